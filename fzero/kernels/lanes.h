// Sums in a fixed order, and functions of one number whose bits depend on it alone, for the canonical forms. Included
// once, after bits.h, in files that are compiled with EXACT: each operation is then rounded by itself, in a vector and
// in the numbers behind the last one alike, and what must be fused is written as fma.
#include <algorithm>
#include <cmath>
#include <limits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef uint16_t Narrow __attribute__((vector_size(2 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

template <typename V, typename T> V read(const T* x) {
  V v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
Vector load(const float* x) { return read<Vector>(x); }
Vector load(const BFloat16* x) {
#if defined(__AVX512F__)  // of which GCC makes two halves else
  const Words words = Words(_mm512_cvtepu16_epi32(read<__m256i>(x))) << 16;
#else
  const Words words = __builtin_convertvector(read<Narrow>(x), Words) << 16;
#endif
  return read<Vector>(&words);
}
// The first `count` numbers, zeros behind them.
template <typename T> Vector load(const T* x, int64_t count) {
  T numbers[LANES] = {};
  std::memcpy(numbers, x, count * sizeof(T));
  return load(numbers);
}
void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

// a b + c, rounded once.
inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return Vector(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#else
  for (int64_t i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// The sum of 16 lanes: lane l and l + 8, then l and l + 4, l and l + 2, l and l + 1.
inline Quarter fold(Vector v) {
  const Half low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const Half half = low + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}
// Those sums of four vectors.
inline Quarter sums(Vector a, Vector b, Vector c, Vector d) {
  const Quarter p = fold(a), q = fold(b), r = fold(c), s = fold(d);
  const Quarter left = __builtin_shufflevector(p, q, 0, 1, 4, 5) + __builtin_shufflevector(p, q, 2, 3, 6, 7);
  const Quarter right = __builtin_shufflevector(r, s, 0, 1, 4, 5) + __builtin_shufflevector(r, s, 2, 3, 6, 7);
  return __builtin_shufflevector(left, right, 0, 2, 4, 6) + __builtin_shufflevector(left, right, 1, 3, 5, 7);
}

// The sum of term(0) to term(n - 1), number i in lane i % 16.
template <typename Term> float sum(int64_t n, Term term) {
  float lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
#pragma omp simd
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += term(i + lane);
  }
  for (; i < n; i++) lanes[i % LANES] += term(i);
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// The same of n numbers, and their largest, at least `least`; n is a multiple of 16.
inline float sum_of(const float* x, int64_t n) {
  Vector total = {};
  for (int64_t i = 0; i < n; i += LANES) total += load(x + i);
  return sum(LANES, [&](int64_t lane) { return total[lane]; });
}
inline float largest_of(const float* x, int64_t n, float least) {
  Vector most = least - Vector{};
  for (int64_t i = 0; i < n; i += LANES) {
    const Vector v = load(x + i);
    most = v > most ? v : most;
  }
  for (int64_t lane = 0; lane < LANES; lane++) least = std::max(least, most[lane]);
  return least;
}

// e^x to a unit and a half in the last place, 0 below -87: x = n ln 2 + r, and a polynomial of r. Ref: Moshier, Cephes
// mathematical library, expf.c.
inline float exponential(float x) {
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, x));
  float y = __builtin_fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
  y = __builtin_fmaf(y, r, 8.3334519073e-3f);
  y = __builtin_fmaf(y, r, 4.1665795894e-2f);
  y = __builtin_fmaf(y, r, 1.6666665459e-1f);
  y = __builtin_fmaf(y, r, 5.0000001201e-1f);
  y = __builtin_fmaf(y, r * r, r) + 1.0f;
  y = real(bits(y) + (uint32_t(int32_t(n)) << 23));
  y = choose(x < -87.0f, 0.0f, choose(x > 88.7228f, std::numeric_limits<float>::infinity(), y));
  return choose(x != x, x, y);
}

inline float logistic(float x) { return 1.0f / (1.0f + exponential(-x)); }

// An odd polynomial near 0, else from the exponential. Ref: Moshier, Cephes mathematical library, tanhf.c.
inline float tangent(float x) {
  const float all = std::fabs(x), size = choose(all > 10.0f, 10.0f, all), z = size * size;
  float near = ((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f;
  near = size + size * z * (near * z - 3.33332819422e-1f);
  const float far = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
  const float y = real(bits(choose(size < 0.625f, near, far)) | (bits(x) & 0x80000000u));
  return choose(x != x, x, y);
}
inline float capped(float x, float cap) { return cap * tangent(x / cap); }

}  // namespace
