// Causal attention of blocks of queries, in one order for each query: its scores are chains of fused multiply-adds over
// the head's numbers; their exponentials are summed in sixteen lanes, by the position of a key behind the first one of
// the query's document; the result is a chain over the keys in order. What a query gets depends on no other query, on
// no other document, and not on where its keys lie: in one tensor or in pages.
//
// A block is of queries of one document and one key/value head: with H / G = `ratio` query heads its rows are (query,
// head). Keys come in tiles of 64, turned, and values in tiles of 64 rows, both as floats. Codes in pages are read as they
// are: the scale of a key is a factor of its scores, that of a value one of its exponentials.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "bits.h"
#include "lanes.h"

namespace {

struct Int8 { int8_t x; };
struct Float8 { uint8_t x; };  // e4m3: 1, 4 and 3 bits, without infinities

// Its bits behind the sign are float32's, 20 to the left, but for the bias of the exponent: a factor of 2^120.
float wide(Float8 x) { return real((x.x & 0x80u) << 24 | (x.x & 0x7fu) << 20) * 0x1p120f; }
float wide(Int8 x) { return float(x.x); }
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
template <typename C> Integers widened(const C* x) {
#if defined(__AVX512F__)
  return Integers(_mm512_cvtepi8_epi32(read<__m128i>(x)));
#else  // in two steps: GCC makes one of four times the width number by number
  return __builtin_convertvector(__builtin_convertvector(read<Bytes>(x), Shorts), Integers);
#endif
}
Vector load(const Int8* x) { return __builtin_convertvector(widened(x), Vector); }
Vector load(const Float8* x) {
  const Words words = Words(widened(x)), moved = (words & 0x80000000u) | (words & 0x7fu) << 20;
  return read<Vector>(&moved) * 0x1p120f;
}

}  // namespace

#include "tiles.h"

namespace {

constexpr int64_t KEYS = 64;            // of a tile, a multiple of PANEL
constexpr int64_t MOST = 128;           // rows of a block
constexpr int64_t SCORES = 256 * 1024;  // numbers of a block, so that they lie in a core's cache

// Strides are of numbers: of rows of the batch or pages, of tokens, of heads.
struct Strides { int64_t row, token, head; };
struct Shape {
  int64_t b, t, s, h, g, k, v;
  int64_t kind, size, keep;  // of the pattern
  int64_t page, pages, threads;  // tokens of a page, 0 for none; pages of a row of the table
  float scale, cap;
  Strides q, keys, values;
};

enum Kind { FULL, WINDOW, LOCAL, STRIDED, FIXED };

// Queries of one document: those at positions `at`, `at` + 1, ..., whose keys begin with position `start`.
struct Block { int64_t row, query, count, at, start; };

template <typename T, typename C> struct Inputs {
  const T* q;
  const C *k, *v;
  const float *key_scales, *value_scales;  // of codes: [pages, page, G], else null
  const float* sinks;    // [H] or null
  const int32_t* table;  // of pages, or null
  const int64_t* documents;
};

bool sees(const Shape& z, int64_t query, int64_t key) {
  switch (z.kind) {
    case WINDOW: return query - key < z.size;
    case LOCAL: return query / z.size == key / z.size;
    case STRIDED: return query - key < z.size || (query - key) % z.size == 0;
    case FIXED: return query / z.size == key / z.size || key % z.size >= z.size - z.keep;
  }
  return true;
}

// The first key that a query may see.
int64_t first_key(const Shape& z, int64_t query) {
  if (z.kind == WINDOW) return query - z.size + 1;
  return z.kind == LOCAL ? query / z.size * z.size : 0;
}

// Rows i and i + D exchange blocks of D lanes: four such steps turn a square of 16.
#define LOW(E, D) ((E) & (D) ? LANES + (E) - (D) : (E))
#define HIGH(E, D) ((E) & (D) ? LANES + (E) : (E) + (D))
#define ALL(PICK, D)                                                                                              \
  PICK(0, D), PICK(1, D), PICK(2, D), PICK(3, D), PICK(4, D), PICK(5, D), PICK(6, D), PICK(7, D), PICK(8, D),     \
      PICK(9, D), PICK(10, D), PICK(11, D), PICK(12, D), PICK(13, D), PICK(14, D), PICK(15, D)
#define STEP(D)                                                                                                   \
  for (int64_t i = 0; i < LANES; i++)                                                                             \
    if (!(i & D)) {                                                                                               \
      const Vector a = x[i], b = x[i + D];                                                                        \
      x[i] = __builtin_shufflevector(a, b, ALL(LOW, D));                                                          \
      x[i + D] = __builtin_shufflevector(a, b, ALL(HIGH, D));                                                     \
    }
inline void turn(Vector* x) {
  STEP(8) STEP(4) STEP(2) STEP(1)
}

template <typename T> void fetch(const T* const* lines, int64_t count, int64_t numbers) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t c = 0; c < numbers; c += 64 / int64_t(sizeof(T))) __builtin_prefetch(lines[i] + c, 0, 2);
}

// The numbers of 64 keys, turned: out [k, 64].
template <typename T> void lay_keys(const T* const* keys, int64_t k, float* out) {
  for (int64_t j = 0; j < KEYS; j += LANES) {
    int64_t c = 0;
    if constexpr (std::is_same_v<T, BFloat16>) {  // two numbers turn together
      for (; c + 2 * LANES <= k; c += 2 * LANES) {
        Vector x[LANES];
        for (int64_t i = 0; i < LANES; i++) x[i] = read<Vector>(keys[j + i] + c);
        turn(x);
        for (int64_t i = 0; i < LANES; i++) {
          const Words both = read<Words>(&x[i]), low = both << 16, high = both & 0xffff0000u;
          store(out + (c + 2 * i) * KEYS + j, read<Vector>(&low));
          store(out + (c + 2 * i + 1) * KEYS + j, read<Vector>(&high));
        }
      }
    }
    for (; c + LANES <= k; c += LANES) {
      Vector x[LANES];
      for (int64_t i = 0; i < LANES; i++) x[i] = load(keys[j + i] + c);
      turn(x);
      for (int64_t i = 0; i < LANES; i++) store(out + (c + i) * KEYS + j, x[i]);
    }
    for (; c < k; c++)
      for (int64_t i = 0; i < LANES; i++) out[c * KEYS + j + i] = wide(keys[j + i][c]);
  }
}

// The scores of a row, of n keys from position `first` on (a multiple of 16, the last ones may be none), become their exponentials; its sum and log-sum-exp.
float soften(const Shape& z, const Block& block, int64_t query, int64_t first, int64_t n, const float* sink,
             const int64_t* documents, float* scores, float& lse) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
#pragma omp simd
  for (int64_t i = 0; i < n; i++) scores[i] *= z.scale;
  if (z.cap != 0.0f) {
    for (int64_t i = 0; i < n; i++) scores[i] = capped(scores[i], z.cap);
  }
  const int64_t low = std::min(n, std::max<int64_t>(0, std::max(block.start, first_key(z, query)) - first));
  const int64_t high = std::max(low, std::min(n, query + 1 - first));
  std::fill(scores, scores + low, NONE);
  std::fill(scores + high, scores + n, NONE);
  if (z.kind == STRIDED || z.kind == FIXED)
    for (int64_t i = low; i < high; i++)
      if (!sees(z, query, first + i)) scores[i] = NONE;
  if (documents)
    for (int64_t i = low; i < high; i++)
      if (documents[first + i] != documents[query]) scores[i] = NONE;
  const float most = largest_of(scores, n, sink ? *sink : NONE);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) scores[i] = exponential(scores[i] - most);
  float total = sum_of(scores, n);
  if (sink) total += exponential(*sink - most);
  lse = most + std::log(total);
  return total;
}

template <typename T> struct Room {
  std::vector<float> q, keys, values, scores, scales, out;
  Room(const Shape& z, int64_t rows) : q(rows * z.k), keys(KEYS * z.k), values(KEYS * padded(z)), out(rows * padded(z)) {}
  static int64_t padded(const Shape& z) { return (z.v + PANEL - 1) / PANEL * PANEL; }
};

template <typename T, typename C>
void attend(const Shape& z, const Inputs<T, C>& in, const Block& block, int64_t group, Room<T>& room, T* out, float* lse) {
  const int64_t ratio = z.h / z.g, rows = block.count * ratio, last = block.at + block.count - 1, width = Room<T>::padded(z);
  // Keys from a multiple of 16 behind the document's first one, so that each keeps its lane.
  const int64_t first = block.start + std::max<int64_t>(0, first_key(z, block.at) - block.start) / LANES * LANES;
  const int64_t n = last + 1 - first, ld = (n + KEYS - 1) / KEYS * KEYS;
  const auto line = [&](const C* x, const Strides& strides, int64_t key) {
    const int64_t row = in.table ? in.table[block.row * z.pages + key / z.page] : block.row;
    return x + row * strides.row + (in.table ? key % z.page : key) * strides.token + group * strides.head;
  };
  const C* lines[KEYS];
  // The `lines` of 64 keys or values from number `key` on, those behind the last one its own.
  const auto point = [&](const C* x, const Strides& strides, int64_t key) {
    for (int64_t i = 0; i < KEYS;) {
      const C* from = line(x, strides, std::min(key + i, last));
      const int64_t step = key + i < last ? strides.token : 0, left = last - key - i;
      const int64_t run = left <= 0 ? KEYS : std::min(left, in.table ? z.page - (key + i) % z.page : KEYS);
      for (const int64_t end = std::min(KEYS, i + run); i < end; i++, from += step) lines[i] = from;
    }
  };
  const auto seen_from = [&](int64_t key) {  // the first row that may see a key
    return std::min(rows, std::max<int64_t>(0, key - block.at) * ratio);
  };
  for (int64_t r = 0; r < rows; r++)
    widen(in.q + (z.page ? 0 : block.row * z.q.row) + (block.query + r / ratio) * z.q.token + (group * ratio + r % ratio) * z.q.head,
          z.k, &room.q[r * z.k]);
  room.scores.assign(rows * ld, 0.0f);
  point(in.k, z.keys, first);
  for (int64_t j = 0; j < n; j += KEYS) {
    lay_keys(lines, z.k, room.keys.data());
    if (j + KEYS < n) {  // the next keys lie apart, where no prefetcher of a CPU looks
      point(in.k, z.keys, first + j + KEYS);
      fetch(lines, KEYS, z.k);
    }
    const int64_t from = seen_from(first + j);
    for (int64_t p = 0; p < KEYS; p += PANEL)
      tiles<WIDE>(rows - from, z.k, &room.q[from * z.k], z.k, &room.keys[p], KEYS, &room.scores[from * ld + j + p], ld);
  }
  // Row r of the scores, times the scales of the keys or values.
  const auto rescale = [&](const float* scales, int64_t r) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) room.scores[r * ld + i] *= scales[i];
  };
  const auto gather = [&](const float* scales) {
    room.scales.resize(n);
    for (int64_t i = 0, key = first; i < n; key = first + i) {
      const float* from = scales + (in.table[block.row * z.pages + key / z.page] * z.page + key % z.page) * z.g + group;
      for (const int64_t end = std::min(n, i + z.page - key % z.page); i < end; i++, from += z.g) room.scales[i] = *from;
    }
  };
  if (in.key_scales) gather(in.key_scales);
  for (int64_t r = 0; in.key_scales && r < rows; r++) rescale(room.scales.data(), r);
  std::vector<float> totals(rows);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t head = group * ratio + r % ratio, query = block.at + r / ratio;
    float& of = lse[z.page ? (block.query + r / ratio) * z.h + head
                           : (block.row * z.h + head) * z.t + block.query + r / ratio];
    totals[r] = soften(z, block, query, first, ld, in.sinks ? in.sinks + head : nullptr,
                       in.documents ? in.documents + block.row * z.s : nullptr, &room.scores[r * ld], of);
  }
  if (in.value_scales && in.value_scales != in.key_scales) gather(in.value_scales);
  for (int64_t r = 0; in.value_scales && r < rows; r++) rescale(room.scales.data(), r);
  std::fill(room.out.begin(), room.out.begin() + rows * width, 0.0f);
  const bool direct = rows <= ROWS && z.v % LANES == 0;
  for (int64_t j = 0; direct && j < n;) {  // values as they lie, of one page or tensor
    const int64_t depth = in.table ? std::min(n - j, z.page - (first + j) % z.page) : n;
    const C* values = line(in.v, z.values, first + j);
    if (j + depth < n && j % KEYS == 0) {
      point(in.v, z.values, first + j + KEYS);
      fetch(lines, KEYS, z.v);
    }
    int64_t c = 0;
    for (; c + PANEL <= z.v; c += PANEL)
      tiles<WIDE>(rows, depth, &room.scores[j], ld, values + c, z.values.token, &room.out[c], width);
    if constexpr (WIDE > 2)
      for (; c + 2 * LANES <= z.v; c += 2 * LANES)
        tiles<2>(rows, depth, &room.scores[j], ld, values + c, z.values.token, &room.out[c], width);
    for (; c < z.v; c += LANES) tiles<1>(rows, depth, &room.scores[j], ld, values + c, z.values.token, &room.out[c], width);
    j += depth;
  }
  for (int64_t j = 0; !direct && j < n; j += KEYS) {
    const int64_t depth = std::min(KEYS, n - j), from = seen_from(first + j);
    point(in.v, z.values, first + j);
    for (int64_t i = 0; i < depth; i++) widen(lines[i], z.v, &room.values[i * width]);
    for (int64_t p = 0; p < width; p += PANEL)
      tiles<WIDE>(rows - from, depth, &room.scores[from * ld + j], ld, &room.values[p], width, &room.out[from * width + p], width);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t query = (z.page ? 0 : block.row * z.t) + block.query + r / ratio, head = group * ratio + r % ratio;
    T* to = out + (query * z.h + head) * z.v;
#pragma omp simd
    for (int64_t c = 0; c < z.v; c++) narrow(room.out[r * width + c] / totals[r], to[c]);
  }
}

// Queries from `query` to `end` of a row, the first at position `at`, cut into blocks.
void cut(const Shape& z, std::vector<Block>& blocks, int64_t row, int64_t query, int64_t end, int64_t at, int64_t start) {
  const int64_t ratio = z.h / z.g;
  while (query < end) {
    const int64_t keys = std::min(at + 1 - start, z.kind == WINDOW ? z.size + MOST : at + 1) + MOST;
    const int64_t most = std::max<int64_t>(1, std::min(MOST, SCORES / keys) / ratio), count = std::min(most, end - query);
    blocks.push_back({row, query, count, at, start});
    query += count, at += count;
  }
}

template <typename T, typename C>
void run(const Shape& z, const Inputs<T, C>& in, const std::vector<Block>& blocks, T* out, float* lse) {
  int64_t most = 1;
  for (const Block& block : blocks) most = std::max(most, block.count);
#pragma omp parallel num_threads(int(z.threads)) if (z.threads > 1)
  {
    Room<T> room(z, most * (z.h / z.g));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < int64_t(blocks.size()) * z.g; i++)
      attend(z, in, blocks[blocks.size() - 1 - i / z.g], i % z.g, room, out, lse);
  }
}

template <typename T>
void attention(const T* q, const T* k, const T* v, const float* sinks, const int64_t* documents, T* out, float* lse,
               const Shape& z) {
  std::vector<Block> blocks;
  bool whole = true;  // whether each document's keys lie side by side
  for (int64_t b = 0; b < z.b; b++) {
    const int64_t behind = z.s - z.t;
    for (int64_t t = 0; t < z.t;) {
      int64_t end = t + 1, start = 0;
      if (documents) {
        const int64_t* of = documents + b * z.s;
        while (end < z.t && of[behind + end] == of[behind + t]) end++;
        while (of[start] != of[behind + t]) start++;
        whole = whole && std::all_of(of + start, of + behind + t, [&](int64_t d) { return d == of[behind + t]; });
      } else {
        end = z.t;
      }
      cut(z, blocks, b, t, end, behind + t, start);
      t = end;
    }
  }
  run(z, Inputs<T, T>{q, k, v, nullptr, nullptr, sinks, nullptr, whole ? nullptr : documents}, blocks, out, lse);
}

template <typename T, typename C>
void paged(const T* q, const C* k, const C* v, const float* key_scales, const float* value_scales, const float* sinks,
           const int32_t* table, const int32_t* starts, const int64_t* positions, T* out, float* lse, const Shape& z) {
  std::vector<Block> blocks;
  for (int64_t r = 0; r < z.b; r++)
    if (starts[r] < starts[r + 1]) cut(z, blocks, r, starts[r], starts[r + 1], positions[starts[r]], 0);
  std::memset(out + int64_t(starts[z.b]) * z.h * z.v, 0, (z.t - starts[z.b]) * z.h * z.v * sizeof(T));
  run(z, Inputs<T, C>{q, k, v, key_scales, value_scales, sinks, table, nullptr}, blocks, out, lse);
}

}  // namespace

#define OF(T, NAME)                                                                                              \
  extern "C" void attention_##NAME(const T* q, const T* k, const T* v, const float* sinks,                       \
                                   const int64_t* documents, T* out, float* lse, const Shape* z) {               \
    attention(q, k, v, sinks, documents, out, lse, *z);                                                          \
  }                                                                                                              \
  PAGED(T, T, NAME##_##NAME) PAGED(T, Int8, NAME##_int8) PAGED(T, Float8, NAME##_fp8_e4m3)
#define PAGED(T, C, NAME)                                                                                        \
  extern "C" void paged_##NAME(const T* q, const C* k, const C* v, const float* key_scales,                      \
                               const float* value_scales, const float* sinks, const int32_t* table,              \
                               const int32_t* starts, const int64_t* positions, T* out, float* lse,              \
                               const Shape* z) {                                                                 \
    paged(q, k, v, key_scales, value_scales, sinks, table, starts, positions, out, lse, *z);                     \
  }
OF(float, float32)
OF(BFloat16, bfloat16)
