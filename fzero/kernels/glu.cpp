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
#include <cstring>

#include "bits.h"

namespace {

using Vector = at::vec::Vectorized<float>;

constexpr int64_t PART = 4096;  // numbers that a thread takes at a time
constexpr int64_t BLOCK = 256;  // and of them a pass, which stay in the nearest cache; a multiple of a vector

// work(first number, numbers) for each block of n numbers.
template <typename Work> void blocks(int64_t n, int64_t threads, Work work) {
#pragma omp parallel for num_threads(int(threads)) if (threads > 1)
  for (int64_t part = 0; part < n; part += PART) {
    const int64_t end = std::min(part + PART, n);
    for (int64_t i = part; i < end; i += BLOCK) work(i, std::min(BLOCK, end - i));
  }
}

// x as it is after it was stored as a T.
template <typename T> float rounded(float x) {
  T y;
  narrow(x, y);
  return wide(y);
}

// Of count numbers of a, by whole vectors: 1 + exp(-a), and a.
template <typename T> void gates(const T* a, int64_t count, float* x, float* below) {
  std::fill(x + count, x + BLOCK, 0.0f);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] = wide(a[i]);
  for (int64_t i = 0; i < count; i += Vector::size())
    (Vector(1.0f) + Vector::loadu(x + i).neg().exp()).store(below + i);
}

template <typename T> void forward(const T* a, const T* b, T* out, int64_t n, int64_t threads) {
  blocks(n, threads, [&](int64_t first, int64_t count) {
    float x[BLOCK], below[BLOCK];
    gates(a + first, count, x, below);
    const T* factor = b + first;
    T* to = out + first;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) narrow(rounded<T>(x[i] / below[i]) * wide(factor[i]), to[i]);
  });
}

template <typename T>
void backward(const T* a, const T* b, const T* g, T* da, T* db, int64_t n, int64_t threads) {
  blocks(n, threads, [&](int64_t first, int64_t count) {
    float x[BLOCK], below[BLOCK], share[BLOCK], slope[BLOCK];
    gates(a + first, count, x, below);
    const Vector one(1.0f);
    for (int64_t i = 0; i < count; i += Vector::size()) {
      const Vector s = one / Vector::loadu(below + i);
      s.store(share + i);
      at::vec::fmadd(Vector::loadu(x + i), one - s, one).store(slope + i);  // fused where torch's is
    }
    const T *factor = b + first, *grads = g + first;
    T *to_a = da + first, *to_b = db + first;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const float grad = wide(grads[i]), of_gate = rounded<T>(grad * wide(factor[i]));
      narrow(of_gate * share[i] * slope[i], to_a[i]);
      narrow(grad * rounded<T>(x[i] / below[i]), to_b[i]);
    }
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
