// Functions of single numbers and of rows, whose bits depend on that number or row alone: not on where it lies in a
// tensor, nor on what is computed beside it. Torch's loops take other functions for the numbers behind the last vector.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "bits.h"
#include "lanes.h"

namespace {

struct Shape { int64_t rows, n, stride, threads; double eps, cap; };

enum Kind { GELU, SIGMOID, TANH, GEGLU, CLAMPED, CAPPED };

constexpr int64_t PART = 4096;  // numbers that a thread takes at a time

inline float gelu(float x) {
  constexpr float SLOPE = 0.7978845608f;  // sqrt(2 / pi)
  return 0.5f * x * (1.0f + tangent(SLOPE * (x + 0.044715f * (x * x * x))));
}

inline float clamped(float a, float b) {
  const float low = choose(a > 7.0f, 7.0f, a);
  const float factor = choose(b > 7.0f, 7.0f, choose(b < -7.0f, -7.0f, b));
  return low * logistic(1.702f * low) * (factor + 1.0f);
}

template <typename T, typename F> void map(const T* a, const T* b, T* out, const Shape& s, F function) {
#pragma omp parallel for num_threads(int(s.threads)) if (s.threads > 1)
  for (int64_t part = 0; part < s.n; part += PART) {
    const int64_t end = std::min(part + PART, s.n);
#pragma omp simd
    for (int64_t i = part; i < end; i++) narrow(function(wide(a[i]), wide(b[i])), out[i]);
  }
}

// b is a where there is one operand.
template <typename T> void numbers(const T* a, const T* b, T* out, int64_t kind, const Shape& s) {
  if (kind == GELU) map(a, b, out, s, [](float x, float) { return gelu(x); });
  if (kind == SIGMOID) map(a, b, out, s, [](float x, float) { return logistic(x); });
  if (kind == TANH) map(a, b, out, s, [](float x, float) { return tangent(x); });
  if (kind == CAPPED) map(a, b, out, s, [&](float x, float) { return capped(x, float(s.cap)); });
  if (kind == GEGLU) {
    map(a, b, out, s, [](float x, float y) {
      T rounded;
      narrow(gelu(x), rounded);
      return wide(rounded) * y;
    });
  }
  if (kind == CLAMPED) map(a, b, out, s, [](float x, float y) { return clamped(x, y); });
}

template <typename T> void layer_norm(const T* x, const T* scale, const T* bias, T* out, const Shape& s) {
#pragma omp parallel for num_threads(int(s.threads)) if (s.threads > 1)
  for (int64_t row = 0; row < s.rows; row++) {
    const T* in = x + row * s.n;
    T* to = out + row * s.n;
    const float mean = sum(s.n, [&](int64_t i) { return wide(in[i]); }) / float(s.n);
    const auto centred = [&](int64_t i) { return wide(in[i]) - mean; };
    const float squares = sum(s.n, [&](int64_t i) { return centred(i) * centred(i); });
    const float r = 1.0f / std::sqrt(squares / float(s.n) + float(s.eps));
    for (int64_t i = 0; i < s.n; i++) {
      T normed, product;
      narrow(centred(i) * r, normed);
      narrow(wide(normed) * wide(scale[i]), product);
      narrow(wide(product) + wide(bias[i]), to[i]);
    }
  }
}

// The numbers of a row less the largest, as exponentials, in `out`, multiples of 16 with zeros behind; the log of their
// sum with the largest, and that sum.
float soften(const float* x, int64_t n, float* out, float& total) {
  const int64_t all = (n + LANES - 1) / LANES * LANES;
  std::fill(out + n, out + all, -std::numeric_limits<float>::infinity());
  if (out != x) std::copy(x, x + n, out);
  const float most = largest_of(out, all, -std::numeric_limits<float>::infinity());
#pragma omp simd
  for (int64_t i = 0; i < all; i++) out[i] = exponential(out[i] - most);
  total = sum_of(out, all);
  return most + std::log(total);
}

int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Shares [rows, n] of the softmax.
void softmax(const float* x, float* out, const Shape& s) {
#pragma omp parallel num_threads(int(s.threads)) if (s.threads > 1)
  {
    std::vector<float> room(padded(s.n));
#pragma omp for
    for (int64_t row = 0; row < s.rows; row++) {
      float total;
      soften(x + row * s.n, s.n, room.data(), total);
#pragma omp simd
      for (int64_t i = 0; i < s.n; i++) out[row * s.n + i] = room[i] / total;
    }
  }
}

// For each row of logits, capped if cap is not 0: the log-sum-exp, the logit of the target, the sum. A target of no
// column has 0, one that is `wrong` NaN.
void losses(const float* logits, const int64_t* targets, int64_t wrong, float* out, const Shape& s) {
#pragma omp parallel num_threads(int(s.threads)) if (s.threads > 1)
  {
    const int64_t all = padded(s.n);
    std::vector<float> room(all);
#pragma omp for
    for (int64_t row = 0; row < s.rows; row++) {
      const float* x = logits + row * s.stride;
      const float cap = float(s.cap);
      if (cap != 0.0f) {
#pragma omp simd
        for (int64_t i = 0; i < s.n; i++) room[i] = capped(x[i], cap);
      } else {
        std::copy(x, x + s.n, room.begin());
      }
      const int64_t target = targets ? targets[row] : -1;
      float* to = out + 3 * row;
      to[1] = target >= 0 && target < s.n ? room[target] : 0.0f;
      if (target == wrong) to[1] = std::numeric_limits<float>::quiet_NaN();
      std::fill(room.begin() + s.n, room.end(), 0.0f);
      to[2] = sum_of(room.data(), all);
      float total;
      to[0] = soften(room.data(), s.n, room.data(), total);
    }
  }
}

// cos and sin of position times frequency, reduced to a quarter of a turn in double. Ref: Moshier, Cephes mathematical
// library, sinf.c.
void turns(float position, const float* frequencies, int64_t n, float* cosines, float* sines) {
  for (int64_t i = 0; i < n; i++) {
    const double angle = double(position * frequencies[i]);
    const double quarters = std::floor(angle * 0.63661977236758134308 + 0.5);
    const float r = float(angle - quarters * 1.57079632679489661923), z = r * r;
    const uint32_t quadrant = uint32_t(int64_t(quarters));
    const float sine = r + r * z * ((z * -1.9515295891e-4f + 8.3321608736e-3f) * z - 1.6666654611e-1f);
    const float cosine =
        1.0f - 0.5f * z + z * z * ((z * 2.443315711809948e-5f - 1.388731625493765e-3f) * z + 4.166664568298827e-2f);
    const bool odd = quadrant & 1;
    const uint32_t turned_cosine = ((quadrant + 1) & 2) << 30, turned_sine = (quadrant & 2) << 30;
    cosines[i] = real(bits(choose(odd, sine, cosine)) ^ turned_cosine);
    sines[i] = real(bits(choose(odd, cosine, sine)) ^ turned_sine);
  }
}

// (a c - b s, b c + a s), each product rounded to T, as torch's operators have it.
template <int64_t STEP, typename T>
void rotate(const T* a, const T* b, const float* cosines, const float* sines, int64_t n, T* to_a, T* to_b) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    T ac, as, bc, bs;
    narrow(wide(a[STEP * i]) * cosines[i], ac), narrow(wide(a[STEP * i]) * sines[i], as);
    narrow(wide(b[STEP * i]) * cosines[i], bc), narrow(wide(b[STEP * i]) * sines[i], bs);
    narrow(wide(ac) - wide(bs), to_a[STEP * i]), narrow(wide(bc) + wide(as), to_b[STEP * i]);
  }
}

// The heads [rows, heads, 2 n] of one tensor or of two, turned by the angle of each row's position, or by minus it.
struct Heads { int64_t rows, n, interleaved, inverse, threads, q_heads, k_heads; };

template <typename T>
void rope(const T* q, const T* k, const int64_t* positions, const float* frequencies, T* out_q, T* out_k, const Heads& s) {
#pragma omp parallel num_threads(int(s.threads)) if (s.threads > 1)
  {
    std::vector<float> turned(2 * s.n);
    float *cosines = turned.data(), *sines = cosines + s.n;
    const auto round = [&](float& x) {
      T rounded;
      narrow(x, rounded), x = wide(rounded);
    };
#pragma omp for
    for (int64_t row = 0; row < s.rows; row++) {
      turns(float(positions[row]), frequencies, s.n, cosines, sines);
      for (float& x : turned) round(x);
      for (int64_t i = 0; s.inverse && i < s.n; i++) sines[i] = -sines[i];
      const auto all = [&](const T* x, int64_t heads, T* out) {
        for (int64_t offset = row * heads * 2 * s.n; heads--; offset += 2 * s.n) {
          const T* from = x + offset;
          T* to = out + offset;
          if (s.interleaved) rotate<2>(from, from + 1, cosines, sines, s.n, to, to + 1);
          else rotate<1>(from, from + s.n, cosines, sines, s.n, to, to + s.n);
        }
      };
      all(q, s.q_heads, out_q);
      all(k, s.k_heads, out_k);
    }
  }
}

}  // namespace

#define OF(T, NAME)                                                                                       \
  extern "C" void numbers_##NAME(const T* a, const T* b, T* out, int64_t kind, const Shape* s) {          \
    numbers(a, b, out, kind, *s);                                                                         \
  }                                                                                                       \
  extern "C" void layer_norm_##NAME(const T* x, const T* scale, const T* bias, T* out, const Shape* s) {  \
    layer_norm(x, scale, bias, out, *s);                                                                  \
  }                                                                                                       \
  extern "C" void rope_##NAME(const T* q, const T* k, const int64_t* positions, const float* frequencies, \
                              T* out_q, T* out_k, const Heads* s) {                                       \
    rope(q, k, positions, frequencies, out_q, out_k, *s);                                                 \
  }
OF(float, float32)
OF(BFloat16, bfloat16)
extern "C" void softmax_rows(const float* x, float* out, const Shape* s) { softmax(x, out, *s); }
extern "C" void loss_rows(const float* x, const int64_t* targets, float* out, int64_t wrong, const Shape* s) {
  losses(x, targets, wrong, out, *s);
}
