// The draws of prng.py, from element numbers to values in one pass, by the same operations in the same order.
//
// Every operation is an element's own and is rounded by itself (compile without contraction of products and sums), so
// that the bits are those of the tensor operations, whatever the width of vectors and the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t TILE = 1024;        // elements at a time: temporaries stay in the first-level cache
constexpr int64_t STRETCH = 1 << 15;  // elements of a thread's piece of work

enum Kind : int64_t { BITS, BERNOULLI, UNIFORM, NORMAL };

struct Draw {
  void* out;             // int64 words, bools, or float32 or float64 values
  const int64_t* index;  // the elements' global indices, or null: first, first + 1, ...
  int64_t first, n, key0, key1, kind, wide, below, threads;
  double start, length;  // p = start + length u
  double mean, std, low, high;
  double centre[2][8], near[2][8], far[2][8];  // coefficients, highest power first: numerator, denominator
};

// ---- words ----

// A word is the lower half of 64 bits, because vector units multiply 64-bit lanes.
void philox(uint64_t block, uint64_t k0, uint64_t k1, uint32_t (&out)[4], uint64_t purpose = 0) {
  constexpr uint64_t low = 0xffffffffu;
  uint64_t c0 = block & low, c1 = block >> 32, c2 = 0, c3 = purpose;
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = c0 * 0xD2511F53u, p1 = c2 * 0xCD9E8D57u;
    c0 = (p1 >> 32) ^ c1 ^ k0, c1 = p1 & low, c2 = (p0 >> 32) ^ c3 ^ k1, c3 = p0 & low;
    k0 = (k0 + 0x9E3779B9u) & low, k1 = (k1 + 0xBB67AE85u) & low;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// The words of n <= TILE elements from local element `at` on, written into `room`; returns where they begin there.
// Element e is word e % 4 of the Philox block e / 4, so a run of elements is drawn in whole blocks and the first e % 4
// words are skipped.
const uint32_t* words(const Draw& d, int64_t at, int64_t n, uint32_t* __restrict room) {
  const uint64_t key0 = d.key0, key1 = d.key1;
  if (d.index) {
    const int64_t* index = d.index + at;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
      uint32_t w[4];
      philox(uint64_t(index[i] >> 2), key0, key1, w);
      const int64_t which = index[i] & 3;
      room[i] = which & 2 ? (which & 1 ? w[3] : w[2]) : (which & 1 ? w[1] : w[0]);
    }
    return room;
  }
  const int64_t index = d.first + at, skip = index & 3, blocks = (skip + n + 3) / 4;
  const uint64_t first = index >> 2;
#pragma omp simd
  for (int64_t j = 0; j < blocks; j++) {
    uint32_t w[4];
    philox(first + j, key0, key1, w);
    room[4 * j] = w[0], room[4 * j + 1] = w[1], room[4 * j + 2] = w[2], room[4 * j + 3] = w[3];
  }
  return room + skip;
}

// ---- values, in float64 ----

void probabilities(const Draw& d, const uint32_t* __restrict w, double* __restrict p, int64_t n) {
  const double start = d.start, length = d.length;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) p[i] = start + length * ((double(w[i]) + 0.5) * 0x1p-32);
}

inline double rational(const double (&c)[2][8], double x) {
  double top = x * c[0][0] + c[0][1], bottom = x * c[1][0] + c[1][1];
  for (int i = 2; i < 8; i++) top = top * x + c[0][i], bottom = bottom * x + c[1][i];
  return top / bottom;
}

inline double log(double x) {
  constexpr uint64_t half = uint64_t(1022) << 52;
  uint64_t pattern;
  std::memcpy(&pattern, &x, 8);
  int32_t exponent = int32_t(pattern >> 52) - 1022;
  pattern = (pattern & 0xFFFFFFFFFFFFF) | half;
  double mantissa;
  std::memcpy(&mantissa, &pattern, 8);
  const bool low = mantissa < 0.7071067811865476;
  mantissa *= 1.0 + low, exponent -= low;
  const double s = (mantissa - 1.0) / (mantissa + 1.0), s2 = s * s;
  double series = 1.0 / 19.0;
  for (int k = 17; k > 0; k -= 2) series = series * s2 + 1.0 / k;
  return double(exponent) * 0.6931471805599453 + 2.0 * s * series;
}

// The normal values z of the probabilities p. The tails (15% of the elements) are gathered first, so that both loops
// are free of branches.
void ndtri(const Draw& d, const double* __restrict p, double* __restrict z, int64_t n) {
  double centre[2][8], near[2][8], far[2][8];
  std::memcpy(centre, d.centre, sizeof centre);
  std::memcpy(near, d.near, sizeof near), std::memcpy(far, d.far, sizeof far);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const double q = p[i] - 0.5;
    z[i] = q * rational(centre, 0.180625 - q * q);
  }
  int32_t at[TILE];
  double r[TILE], tail[TILE], beyond = 0.0;
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    at[count] = int32_t(i), tail[count] = p[i];
    count += !(std::fabs(p[i] - 0.5) <= 0.425);
  }
#pragma omp simd reduction(max : beyond)
  for (int64_t j = 0; j < count; j++) {
    r[j] = std::sqrt(-log(std::min(tail[j], 1.0 - tail[j])));
    beyond = std::max(beyond, r[j]);
  }
  for (int64_t j = 0; j < count; j++) {
    const double value = rational(near, r[j] - 1.6);
    tail[j] = tail[j] - 0.5 < 0 ? -value : value;
  }
  if (beyond > 5.0)
    for (int64_t j = 0; j < count; j++) {
      const double value = rational(far, r[j] - 5.0);
      tail[j] = r[j] <= 5.0 ? tail[j] : std::copysign(value, tail[j]);
    }
  for (int64_t j = 0; j < count; j++) z[at[j]] = tail[j];
}

void tile(const Draw& d, int64_t at, int64_t n) {
  uint32_t room[TILE + 8];
  double p[TILE], z[TILE];
  const uint32_t* w = words(d, at, n, room);
  if (d.kind == BITS) return (void)std::copy(w, w + n, static_cast<int64_t*>(d.out) + at);
  if (d.kind == BERNOULLI) {
    const int64_t below = d.below;
    bool* out = static_cast<bool*>(d.out) + at;
    for (int64_t i = 0; i < n; i++) out[i] = int64_t(w[i]) < below;
    return;
  }
  probabilities(d, w, p, n);
  if (d.kind == NORMAL) {
    const double mean = d.mean, std = d.std, low = d.low, high = d.high;
    ndtri(d, p, z, n);
    for (int64_t i = 0; i < n; i++) p[i] = mean + std * std::min(std::max(z[i], low), high);
  }
  if (d.wide) return (void)std::copy(p, p + n, static_cast<double*>(d.out) + at);
  float* out = static_cast<float*>(d.out) + at;
  for (int64_t i = 0; i < n; i++) out[i] = float(p[i]);
}

}  // namespace

extern "C" void draw(const Draw* d) {
  const int64_t pieces = (d->n + STRETCH - 1) / STRETCH;
#pragma omp parallel for num_threads(std::max<int64_t>(1, std::min(d->threads, pieces))) schedule(dynamic)
  for (int64_t i = 0; i < pieces; i++) {
    const int64_t end = std::min((i + 1) * STRETCH, d->n);
    for (int64_t at = i * STRETCH; at < end; at += TILE) tile(*d, at, std::min(TILE, end - at));
  }
}

// Row r of `rows` rows of d->n uniform values, one after the other, by the key in words 2 r and 2 r + 1 of `keys`.
extern "C" void draw_rows(const Draw* d, const int64_t* keys, int64_t rows) {
  const int64_t pieces = (d->n + STRETCH - 1) / STRETCH, size = d->wide ? 8 : 4;
#pragma omp parallel for num_threads(std::max<int64_t>(1, std::min(d->threads, pieces * rows / 4))) schedule(dynamic)
  for (int64_t i = 0; i < pieces * rows; i++) {
    const int64_t row = i / pieces, start = i % pieces * STRETCH, end = std::min(start + STRETCH, d->n);
    Draw own = *d;
    own.key0 = keys[2 * row], own.key1 = keys[2 * row + 1];
    own.out = static_cast<char*>(d->out) + size * d->n * row;
    if (d->index) own.index = d->index + d->n * row;
    for (int64_t at = start; at < end; at += TILE) tile(own, at, std::min(TILE, end - at));
  }
}

// The first two words of the blocks with counters (data[i], 0, purpose) under keys[i], each two words.
extern "C" void fold(const int64_t* keys, const int64_t* data, int64_t* out, int64_t n, int64_t purpose) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t w[4];
    philox(uint64_t(data[i]), keys[2 * i], keys[2 * i + 1], w, purpose);
    out[2 * i] = w[0], out[2 * i + 1] = w[1];
  }
}
