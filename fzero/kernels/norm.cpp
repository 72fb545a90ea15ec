// RMSNorm of rows, alone or after a sum, and its gradients, as norm.py defines them, each in one pass over memory. Rows
// are contiguous. Sums over a row have a fixed number of lanes, sums over rows are made in parts of a fixed number of
// rows: the results do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "bits.h"

namespace {

constexpr int LANES = 32;

struct Shape { int64_t rows, n, rows_a_part, threads; double eps; };

// The sum of term(0) to term(n - 1).
template <typename Term> float sum(int64_t n, Term term) {
  float lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
#pragma omp simd
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] += term(i + lane);
  }
  for (; i < n; ++i) lanes[i % LANES] += term(i);
  float total = 0.0f;
  for (float lane : lanes) total += lane;
  return total;
}

template <typename T>
void forward(const T* x, const T* residual, const T* scale, T* y, T* total, float* inverse, const Shape& s) {
#pragma omp parallel for num_threads(int(s.threads)) if (s.threads > 1)
  for (int64_t row = 0; row < s.rows; ++row) {
    const T* in = x + row * s.n;
    if (residual != nullptr) {
      const T* more = residual + row * s.n;
      T* both = total + row * s.n;
#pragma omp simd
      for (int64_t i = 0; i < s.n; ++i) narrow(wide(in[i]) + wide(more[i]), both[i]);
      in = both;
    }
    const float squares = sum(s.n, [&](int64_t i) { return wide(in[i]) * wide(in[i]); });
    const float r = 1.0f / std::sqrt(squares / float(s.n) + float(s.eps));
    T* out = y + row * s.n;
#pragma omp simd
    for (int64_t i = 0; i < s.n; ++i) {
      T normed;
      narrow(wide(in[i]) * r, normed);
      narrow(wide(normed) * wide(scale[i]), out[i]);
    }
    inverse[row] = r;
  }
}

// by_scale: a row of n for each part, of zeros.
template <typename T>
void backward(const T* g, const T* total_g, const T* x, const T* scale, const float* inverse, T* dx,
              float* by_scale, const Shape& s) {
  const int64_t parts = (s.rows + s.rows_a_part - 1) / s.rows_a_part;
#pragma omp parallel for num_threads(int(s.threads)) if (s.threads > 1)
  for (int64_t part = 0; part < parts; ++part) {
    float* own = by_scale + part * s.n;
    for (int64_t row = part * s.rows_a_part; row < std::min((part + 1) * s.rows_a_part, s.rows); ++row) {
      const T *grad = g + row * s.n, *in = x + row * s.n;
      T* out = dx + row * s.n;
      const float r = inverse[row];
      const float along =
          sum(s.n, [&](int64_t i) { return wide(grad[i]) * wide(scale[i]) * (wide(in[i]) * r); }) / float(s.n);
      const auto by_x = [&](int64_t i) { return (wide(grad[i]) * wide(scale[i]) - wide(in[i]) * r * along) * r; };
      if (total_g == nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < s.n; ++i) narrow(by_x(i), out[i]);
      } else {
        const T* more = total_g + row * s.n;
#pragma omp simd
        for (int64_t i = 0; i < s.n; ++i) narrow(by_x(i) + wide(more[i]), out[i]);
      }
#pragma omp simd
      for (int64_t i = 0; i < s.n; ++i) own[i] += wide(grad[i]) * (wide(in[i]) * r);
    }
  }
}

}  // namespace

#define OF(T, NAME)                                                                               \
  extern "C" void forward_##NAME(const T* x, const T* residual, const T* scale, T* y, T* total,   \
                                 float* inverse, const Shape* s) {                                \
    forward(x, residual, scale, y, total, inverse, *s);                                           \
  }                                                                                               \
  extern "C" void backward_##NAME(const T* g, const T* total_g, const T* x, const T* scale,       \
                                  const float* inverse, T* dx, float* by_scale, const Shape* s) { \
    backward(g, total_g, x, scale, inverse, dx, by_scale, *s);                                    \
  }
OF(float, float32)
OF(BFloat16, bfloat16)
