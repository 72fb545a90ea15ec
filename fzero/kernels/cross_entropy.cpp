// The statistics and the gradient of rows of logits, as cross_entropy.py defines them; the gradient may replace
// the logits. Row i begins at i * stride, its columns are contiguous and are columns first, first + 1, ... of the
// vocabulary. One thread handles a row in a fixed order: results do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "bits.h"

namespace {

constexpr int64_t TILE = 2048;  // columns at a time: converted once, then two passes in the first-level cache
constexpr int64_t NONE = -1, WRONG = -2;  // replace a target, see cross_entropy_triton.py

template <typename T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

struct Shape {
  int64_t n, columns, stride, out_stride, first, threads, given;
  double z_loss, smoothing, uniform, cap;
};

// exp(x) for x <= 0, 0 below -87: the nearest power of 2 by the exponent's bits, times a polynomial of the rest
// (Cephes, expf).
float exponential(float x) {
  const float whole = std::nearbyint(x * 1.44269504f);
  const float r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  float y = 1.6666665459e-1f +
            r * (4.1665795894e-2f + r * (8.3334519073e-3f + r * (1.3981999507e-3f + r * 1.9875691500e-4f)));
  y = 1.0f + r + r * r * (0.5f + r * y);
  return choose(x < -87.0f, 0.0f, real(bits(y) + (uint32_t(int32_t(whole)) << 23)));
}
double exponential(double x) { return std::exp(x); }

// 1 - 2 / (exp(2x) + 1) cancels near 0, so small arguments use the series.
float hyperbolic_tangent(float x) {
  const float square = x * x, e = exponential(-2.0f * std::fabs(x));
  const float series =
      x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835)))));
  return choose(square < 0.09f, series, real(bits((1.0f - e) / (1.0f + e)) | (bits(x) & 0x80000000u)));
}
double hyperbolic_tangent(double x) { return std::tanh(x); }

template <bool CAP, typename T>
Wide<T> value(T x, Wide<T> cap) {
  if constexpr (CAP) return hyperbolic_tangent(wide(x) / cap) * cap;
  return wide(x);
}

template <bool CAP, typename T>
void row(const T* x, T* out, int64_t target, Wide<T>* statistics, const Shape& z) {
  using W = Wide<T>;
  constexpr W none = -std::numeric_limits<W>::infinity();
  const W cap = z.cap, uniform = z.uniform, twice = 2.0 * z.z_loss;
  const int64_t column = target - z.first;
  const bool own = target >= 0 && column >= 0 && column < z.columns;
  const W at_target = own ? value<CAP>(x[column], cap) : target == WRONG ? std::numeric_limits<W>::quiet_NaN() : W(0);
  W lse = statistics[0];
  if (!z.given) {
    W y[TILE], m = none, s = 0, total = 0;
    for (int64_t start = 0; start < z.columns; start += TILE) {
      const int64_t count = std::min(TILE, z.columns - start);
      W top = none, part = 0, sum = 0;
#pragma omp simd reduction(max : top)
      for (int64_t j = 0; j < count; j++) {
        y[j] = value<CAP>(x[start + j], cap);
        top = std::max(top, y[j]);
      }
      if (top > m) {
        s = s > 0 ? s * exponential(m - top) : s;
        m = top;
      }
      const W base = m == none ? W(0) : m;
#pragma omp simd reduction(+ : part)
      for (int64_t j = 0; j < count; j++) part += exponential(y[j] - base);
      s += part;
      if (z.smoothing != 0) {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < count; j++) sum += y[j];
        total += sum;
      }
    }
    lse = (m == none ? W(0) : m) + std::log(s);
    statistics[0] = lse, statistics[1] = at_target, statistics[2] = total;
  }
  if (!out) return;
  if (target == NONE) return std::fill(out, out + z.columns, T{});
  const W scale = 1 + twice * lse;
#pragma omp simd
  for (int64_t j = 0; j < z.columns; j++) {
    const W y = value<CAP>(x[j], cap);
    const W slope = exponential(y - lse) * scale - uniform;
    narrow(CAP ? slope * (1 - (y / cap) * (y / cap)) : slope, out[j]);
  }
  if (own) {
    const W p = std::exp(at_target - lse);
    const W slope = std::expm1(at_target - lse) + twice * lse * p + W(z.smoothing) - uniform;
    narrow(CAP ? slope * (1 - (at_target / cap) * (at_target / cap)) : slope, out[column]);
  }
}

template <typename T>
void rows(const void* logits, void* out, const int64_t* targets, void* statistics, const Shape& z) {
#pragma omp parallel for num_threads(z.threads) schedule(static)
  for (int64_t i = 0; i < z.n; i++) {
    const T* x = static_cast<const T*>(logits) + i * z.stride;
    T* to = out ? static_cast<T*>(out) + i * z.out_stride : nullptr;
    (z.cap != 0 ? row<true, T> : row<false, T>)(x, to, targets[i], static_cast<Wide<T>*>(statistics) + 3 * i, z);
  }
}

}  // namespace

extern "C" {
void rows_bfloat16(const void* x, void* out, const int64_t* t, void* s, const Shape* z) {
  rows<BFloat16>(x, out, t, s, *z);
}
void rows_float32(const void* x, void* out, const int64_t* t, void* s, const Shape* z) {
  rows<float>(x, out, t, s, *z);
}
void rows_float64(const void* x, void* out, const int64_t* t, void* s, const Shape* z) {
  rows<double>(x, out, t, s, *z);
}
}
