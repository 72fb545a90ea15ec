// SwiGLU and its gradients, as glu.py defines them, in one pass over memory. Each operation is made and rounded as torch
// makes it, with its vectors.
#if defined(OF_AVX512)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#elif defined(OF_AVX2)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#endif
#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cstdint>

namespace {

using at::BFloat16;
using at::vec::Vectorized;
using Vector = Vectorized<float>;

constexpr int64_t PART = 4096;  // numbers that a thread takes at a time, a multiple of a vector's
constexpr int64_t WIDTH = Vector::size();

Vector load(const float* x, int64_t count) { return Vector::loadu(x, count); }
Vector load(const BFloat16* x, int64_t count) {
  float wide[WIDTH] = {};
  for (int64_t i = 0; i < count; ++i) wide[i] = float(x[i]);
  return Vector::loadu(wide);
}
void store(Vector x, float* to, int64_t count) { x.store(to, count); }
void store(Vector x, BFloat16* to, int64_t count) {
  float wide[WIDTH];
  x.store(wide);
  for (int64_t i = 0; i < count; ++i) to[i] = BFloat16(wide[i]);
}

// x as it is after it was stored as a T.
template <typename T> Vector rounded(Vector x) {
  if constexpr (std::is_same_v<T, float>) return x;
  float wide[WIDTH];
  x.store(wide);
  for (float& one : wide) one = float(T(one));
  return Vector::loadu(wide);
}

// work(first number, numbers) for each vector of n numbers.
template <typename Work> void each_vector(int64_t n, int64_t threads, Work work) {
#pragma omp parallel for num_threads(int(threads)) if (threads > 1)
  for (int64_t part = 0; part < n; part += PART) {
    const int64_t end = std::min(part + PART, n);
    for (int64_t i = part; i < end; i += WIDTH) work(i, std::min(WIDTH, end - i));
  }
}

template <typename T> void forward(const T* a, const T* b, T* out, int64_t n, int64_t threads) {
  const Vector one(1.0f);
  each_vector(n, threads, [&](int64_t i, int64_t count) {
    const Vector x = load(a + i, count);
    store(rounded<T>(x / (one + x.neg().exp())) * load(b + i, count), out + i, count);
  });
}

template <typename T>
void backward(const T* a, const T* b, const T* g, T* da, T* db, int64_t n, int64_t threads) {
  const Vector one(1.0f);
  each_vector(n, threads, [&](int64_t i, int64_t count) {
    const Vector x = load(a + i, count), grad = load(g + i, count), below = one + x.neg().exp();
    const Vector s = one / below, of_gate = rounded<T>(grad * load(b + i, count));
    store(of_gate * s * at::vec::fmadd(x, one - s, one), da + i, count);
    store(grad * rounded<T>(x / below), db + i, count);
  });
}

}  // namespace

#define OF(T, NAME)                                                                                             \
  extern "C" void forward_##NAME(const T* a, const T* b, T* out, int64_t n, int64_t threads) {                  \
    forward(a, b, out, n, threads);                                                                             \
  }                                                                                                             \
  extern "C" void backward_##NAME(const T* a, const T* b, const T* g, T* da, T* db, int64_t n, int64_t threads) { \
    backward(a, b, g, da, db, n, threads);                                                                      \
  }
OF(float, float32)
OF(BFloat16, bfloat16)
