// Products with a weight in codes, of which no more than some rows of a panel is ever dequantised in memory.
//
// w[k, n] = value(codes[k, n]) scales[k, n / block]: int8, or two codes a byte, the earlier in the low half. Each element
// of the result is a chain of fused multiply-adds over k = 0, 1, ..., for any number of rows. Of few rows codes are
// decoded in registers; of more a panel of columns is laid out, once.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bits.h"
#include "lanes.h"
#include "tiles.h"

namespace {

constexpr int64_t FEW = 12;      // rows for which codes are decoded in registers
constexpr int64_t SHALLOW = 32;  // k that a tile takes at a time
constexpr int64_t DEPTH = 256, BLOCK = 192;

typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

enum Code { INT8, INT4, NF4 };
template <Code KIND> constexpr int64_t VECTORS = KIND == INT8 ? 1 : 2;  // of a unit of codes, 16 bytes

struct Shape { int64_t m, k, n, block, kind, threads; const float* levels; };

inline Whole integers(const uint8_t* data) {
#if defined(__AVX512F__)
  return Whole(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data))));
#else
  return __builtin_convertvector(read<Bytes>(data), Whole);
#endif
}

// The 16 numbers that the low halves of the indices name.
inline Vector look_up(Vector table, Whole indices) {
#if defined(__AVX512F__)
  return Vector(_mm512_permutexvar_ps(__m512i(indices), __m512(table)));
#else
  Vector v;
  for (int64_t i = 0; i < LANES; i++) v[i] = table[indices[i] & 15];
  return v;
#endif
}

// What the codes of a block stand for: their scale, or the products of the 16 levels and the scale.
template <Code KIND> inline Vector table_of(float scale, Vector levels) {
  const Vector all = scale - Vector{};
  if constexpr (KIND == INT8) return all;
  return levels * all;
}

// A unit of 16 bytes: of two codes a byte the earlier ones come first, then the later ones.
template <Code KIND> inline void decode(const uint8_t* data, Vector table, Vector* out) {
  const Whole bytes = integers(data);
  if constexpr (KIND == INT8) {
    out[0] = __builtin_convertvector(bytes, Vector) * table;
  } else {
    out[0] = look_up(table, bytes);
    out[1] = look_up(table, bytes >> 4);
  }
}

template <Code KIND> float value(const uint8_t* row, int64_t n, const float* levels) {
  if constexpr (KIND == INT8) return float(int8_t(row[n]));
  const uint8_t code = n % 2 ? row[n / 2] >> 4 : row[n / 2] & 15;
  return levels[code];
}

// The numbers of C units of codes from `row` on, whose blocks have the scales scales[at[0]], scales[at[1]], ...; PAIR
// units lie in one block.
template <Code KIND, int64_t C, int64_t PAIR>
inline void decode_units(const uint8_t* row, const float* scales, const int64_t* at, Vector levels, Vector* out) {
#pragma GCC unroll 16
  for (int64_t j = 0; j < C; j += PAIR) {
    const Vector table = table_of<KIND>(scales[at[j]], levels);
    for (int64_t i = j; i < j + PAIR; i++) decode<KIND>(row + i * LANES, table, out + i * VECTORS<KIND>);
  }
}

// c [m, C units] += x [m, depth] times C units of codes from row k and column n on; at: the blocks of these units.
template <Code KIND, int64_t C, int64_t PAIR>
void coded(const Shape& s, int64_t k, int64_t depth, const float* x, const uint8_t* codes, const float* scales,
           const int64_t* at, int64_t n, float* c, int64_t ldc) {
  constexpr int64_t V = VECTORS<KIND>, STRIP = C * V, TILE = STRIP < WIDE ? STRIP : WIDE;
  const int64_t width = s.n / V, blocks = (s.n + s.block - 1) / s.block;
  const Vector levels = load(s.levels);
  const uint8_t* row = codes + k * width + n / V;
  scales += k * blocks;
  Vector total[STRIP], right[STRIP];
  alignas(64) float laid[SHALLOW * STRIP * LANES];
#pragma GCC unroll 16
  for (int64_t j = 0; j < STRIP; j++) total[j] = load(c + j * LANES);
  for (int64_t i = 0; i < depth; i++, row += width, scales += blocks) {
    // The same bytes of the next rows: memory is read in pieces of rows, which no processor foresees.
    for (int64_t j = 0; j < C * LANES; j += 64) __builtin_prefetch(row + SHALLOW * width + j);
    decode_units<KIND, C, PAIR>(row, scales, at, levels, right);
    if (s.m == 1) {
      const Vector left = x[k + i] - Vector{};
#pragma GCC unroll 16
      for (int64_t j = 0; j < STRIP; j++) total[j] = fused(left, right[j], total[j]);
    } else {
#pragma GCC unroll 16
      for (int64_t j = 0; j < STRIP; j++) store(laid + (i * STRIP + j) * LANES, right[j]);
    }
  }
  if (s.m == 1) {
#pragma GCC unroll 16
    for (int64_t j = 0; j < STRIP; j++) store(c + j * LANES, total[j]);
  } else {
    for (int64_t j = 0; j < STRIP; j += TILE)
      tiles<TILE>(s.m, depth, x + k, s.k, laid + j * LANES, STRIP * LANES, c + j * LANES, ldc);
  }
}

template <Code KIND, int64_t PAIR, typename T>
void few(const Shape& s, const float* x, const uint8_t* codes, const float* scales, int64_t first, int64_t end, T* out) {
  constexpr int64_t V = VECTORS<KIND>, UNIT = V * LANES, MANY = (WIDE > 1 ? 8 : 2) / V;
  const int64_t ldc = end - first;
  std::vector<float> c(s.m * ldc);
  std::vector<int64_t> at(ldc / UNIT);  // the block of each unit: divisions in each tile take a fifth of its time
  for (int64_t i = 0; i < ldc / UNIT; i++) at[i] = (first + i * UNIT) / s.block;
  for (int64_t k = 0; k < s.k; k += SHALLOW) {
    const int64_t depth = std::min(SHALLOW, s.k - k);
    int64_t n = first;
    for (; n + MANY * UNIT <= end; n += MANY * UNIT)
      coded<KIND, MANY, MANY < PAIR ? MANY : PAIR>(s, k, depth, x, codes, scales, &at[(n - first) / UNIT], n,
                                                   &c[n - first], ldc);
    for (; n < end; n += UNIT)
      coded<KIND, 1, 1>(s, k, depth, x, codes, scales, &at[(n - first) / UNIT], n, &c[n - first], ldc);
  }
  for (int64_t m = 0; m < s.m; m++)
    for (int64_t n = 0; n < ldc; n += UNIT)
      for (int64_t i = 0; i < UNIT; i++)
        narrow(c[m * ldc + n + i % V * LANES + i / V], out[m * s.n + first + n + i]);
}

template <Code KIND, typename T>
void panel(const Shape& s, const float* x, const uint8_t* codes, const float* scales, int64_t n, float* laid, float* c,
           T* out) {
  const int64_t columns = std::min(PANEL, s.n - n), width = (s.n + VECTORS<KIND> - 1) / VECTORS<KIND>;
  const int64_t blocks = (s.n + s.block - 1) / s.block;
  int64_t at[PANEL];  // of the scales of a row
  for (int64_t i = 0; i < columns; i++) at[i] = (n + i) / s.block;
  constexpr int64_t V = VECTORS<KIND>, UNIT = V * LANES;
  const int64_t units = PANEL % UNIT == 0 && s.n % UNIT == 0 && s.block % UNIT == 0 ? columns / UNIT * UNIT : 0;
  for (int64_t k = 0; k < s.k; k++) {
    const uint8_t* row = codes + k * width;
    float* to = laid + k * PANEL;
    for (int64_t i = 0; i < units; i += UNIT) {
      Vector x[V];
      decode<KIND>(row + (n + i) / V, table_of<KIND>(scales[k * blocks + at[i]], load(s.levels)), x);
      if constexpr (V == 1) {
        store(to + i, x[0]);
      } else {
        store(to + i, __builtin_shufflevector(x[0], x[1], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
        store(to + i + LANES,
              __builtin_shufflevector(x[0], x[1], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
      }
    }
    for (int64_t i = units; i < columns; i++)
      to[i] = value<KIND>(row, n + i, s.levels) * scales[k * blocks + at[i]];
  }
  for (int64_t m = 0; m < s.m; m += BLOCK) {
    const int64_t rows = std::min(BLOCK, s.m - m);
    std::fill(c, c + rows * PANEL, 0.0f);
    for (int64_t k = 0; k < s.k; k += DEPTH)
      tiles<WIDE>(rows, std::min(DEPTH, s.k - k), x + m * s.k + k, s.k, laid + k * PANEL, PANEL, c, PANEL);
    for (int64_t r = 0; r < rows; r++) round_to(c + r * PANEL, columns, out + (m + r) * s.n + n);
  }
}

template <Code KIND, typename T>
void product(const float* x, const uint8_t* codes, const float* scales, T* out, const Shape& s) {
  constexpr int64_t UNIT = VECTORS<KIND> * LANES;
  if (s.m <= FEW && s.n % UNIT == 0 && s.block % UNIT == 0) {
    const int64_t pair = 2 * UNIT, share = (s.n + s.threads * pair - 1) / (s.threads * pair) * pair;
#pragma omp parallel for num_threads(int(s.threads)) if (s.threads > 1)
    for (int64_t first = 0; first < s.n; first += share) {
      const int64_t end = std::min(first + share, s.n);
      if (s.block % pair) few<KIND, 1>(s, x, codes, scales, first, end, out);
      else few<KIND, 2>(s, x, codes, scales, first, end, out);
    }
    return;
  }
#pragma omp parallel num_threads(int(s.threads)) if (s.threads > 1)
  {
    std::vector<float> laid(s.k * PANEL), c(BLOCK * PANEL);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < s.n; n += PANEL) panel<KIND>(s, x, codes, scales, n, laid.data(), c.data(), out);
  }
}

template <typename T> void product_of(const float* x, const uint8_t* codes, const float* scales, T* out, const Shape& s) {
  if (s.kind == INT8) product<INT8>(x, codes, scales, out, s);
  if (s.kind == INT4) product<INT4>(x, codes, scales, out, s);
  if (s.kind == NF4) product<NF4>(x, codes, scales, out, s);
}

}  // namespace

#define OF(T, NAME)                                                                                               \
  extern "C" void product_##NAME(const T* x, const uint8_t* codes, const float* scales, T* out, const Shape* s) { \
    std::vector<float> memory;                                                                                    \
    product_of(in_float(x, s->m * s->k, memory), codes, scales, out, *s);                                         \
  }
OF(float, float32)
OF(BFloat16, bfloat16)
