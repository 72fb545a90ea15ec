// What a record of calls has in place of torch's operators: the same bits, without what an operator does before its
// loop, whose code no cache has after a layer's weights went through it.
#include <cstdint>
#include <cstring>

#include "bits.h"

namespace {

template <typename T> void add(const T* a, const T* b, T* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) narrow(wide(a[i]) + wide(b[i]), out[i]);
}

}  // namespace

extern "C" void add_float32(const float* a, const float* b, float* out, int64_t n) { add(a, b, out, n); }
extern "C" void add_bfloat16(const BFloat16* a, const BFloat16* b, BFloat16* out, int64_t n) { add(a, b, out, n); }

// Row i of `rows` to row indices[i] of `table`, which has `count` rows of `size` bytes; the first i whose index is none of
// them, or n.
extern "C" int64_t copy_rows(char* table, const int64_t* indices, const char* rows, int64_t n, int64_t size,
                             int64_t count) {
  for (int64_t i = 0; i < n; i++) {
    if (indices[i] < 0 || indices[i] >= count) return i;
    std::memcpy(table + indices[i] * size, rows + i * size, size);
  }
  return n;
}
