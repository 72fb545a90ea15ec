// Blocks of numbers to codes of eight or four bits and back, as quantize_codes.py defines them, in one pass over memory.
// A row has n numbers and ceil(n / block) blocks, the last of which may be shorter; rows are contiguous. Each operation
// is rounded by itself, so the bits are those of the definition, whatever the number of threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "bits.h"

namespace {

constexpr int64_t LARGEST_BLOCK = 8192;
constexpr int64_t FEW = 1 << 15;  // numbers up to which one thread does all of it
constexpr float SMALLEST = 0x1p-126f;
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: y + ROUNDER is y to nearest, ties to even, in its low bits

struct Shape {
  int64_t rows, n, block, threads, parts;

  int64_t blocks() const { return (n + block - 1) / block; }
};

template <int BITS> int64_t width(int64_t numbers) { return BITS == 4 ? (numbers + 1) / 2 : numbers; }

// The codes of `count` numbers, which are one block; returns their scale.
template <int BITS, typename T> float encode(const T* x, int64_t count, uint8_t* data) {
  constexpr float largest = BITS == 4 ? 7.0f : 127.0f;
  uint32_t magnitude = 0;  // ordered as the numbers are, with infinity and NaN at the top
#pragma omp simd reduction(max : magnitude)
  for (int64_t i = 0; i < count; ++i) magnitude = std::max(magnitude, bits(wide(x[i])) & 0x7fffffffu);
  if (magnitude >= 0x7f800000u) {
    std::memset(data, 0, width<BITS>(count));
    return std::numeric_limits<float>::infinity();
  }
  const float scale = std::max(real(magnitude) / largest, SMALLEST), inverse = 1.0f / scale;
  // |x inverse| is below largest + 1/2, so the low bits of the sum are the code.
  if constexpr (BITS == 8) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) data[i] = uint8_t(bits(wide(x[i]) * inverse + ROUNDER));
  } else {
    const auto code = [&](int64_t i) { return bits(wide(x[i]) * inverse + ROUNDER) & 15u; };
#pragma omp simd
    for (int64_t i = 0; i < count / 2; ++i) data[i] = uint8_t(code(2 * i) | code(2 * i + 1) << 4);
    if (count % 2) data[count / 2] = uint8_t(code(count - 1));
  }
  return scale;
}

// put(i, what the code of number i stands for) for one block.
template <int BITS, typename Put> void decode(const uint8_t* data, float scale, int64_t count, Put put) {
  if constexpr (BITS == 8) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) put(i, float(int8_t(data[i])) * scale);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count / 2; ++i) {
      put(2 * i, float(int8_t(data[i] << 4) >> 4) * scale);
      put(2 * i + 1, float(int8_t(data[i]) >> 4) * scale);
    }
    if (count % 2) put(count - 1, float(int8_t(data[count / 2] << 4) >> 4) * scale);
  }
}

// work(number of the block, row, first number in the row, numbers) for every block.
template <typename Work> void each_block(const Shape& s, Work work) {
  const int64_t blocks = s.blocks(), all = s.rows * blocks;
#pragma omp parallel for num_threads(int(s.threads)) if (s.rows * s.n > FEW && s.threads > 1)
  for (int64_t i = 0; i < all; ++i) {
    const int64_t first = i % blocks * s.block;
    work(i, i / blocks, first, std::min(s.block, s.n - first));
  }
}

template <int BITS, typename T> void quantize(const T* x, uint8_t* data, float* scale, const Shape& s) {
  each_block(s, [&](int64_t i, int64_t row, int64_t first, int64_t count) {
    scale[i] = encode<BITS>(x + row * s.n + first, count, data + row * width<BITS>(s.n) + width<BITS>(first));
  });
}

template <int BITS, typename T> void dequantize(const uint8_t* data, const float* scale, T* out, const Shape& s) {
  each_block(s, [&](int64_t i, int64_t row, int64_t first, int64_t count) {
    T* to = out + row * s.n + first;
    decode<BITS>(data + row * width<BITS>(s.n) + width<BITS>(first), scale[i], count,
                 [&](int64_t at, float value) { narrow(value, to[at]); });
  });
}

// The codes of the sum of `parts` tensors, added in order.
template <int BITS>
void add(const uint8_t* data, const float* scale, uint8_t* total, float* total_scale, const Shape& s) {
  const int64_t bytes = s.rows * width<BITS>(s.n), scales = s.rows * s.blocks();
  each_block(s, [&](int64_t i, int64_t row, int64_t first, int64_t count) {
    float sum[LARGEST_BLOCK];
    std::fill(sum, sum + count, 0.0f);
    const int64_t at = row * width<BITS>(s.n) + width<BITS>(first);
    for (int64_t part = 0; part < s.parts; ++part) {
      decode<BITS>(data + part * bytes + at, scale[part * scales + i], count,
                   [&](int64_t j, float value) { sum[j] += value; });
    }
    total_scale[i] = encode<BITS>(sum, count, total + at);
  });
}

}  // namespace

extern "C" {

#define OF_KIND(KIND, BITS)                                                                                  \
  void quantize_##KIND##_float32(const float* x, uint8_t* data, float* scale, const Shape* s) {              \
    quantize<BITS>(x, data, scale, *s);                                                                      \
  }                                                                                                          \
  void quantize_##KIND##_bfloat16(const BFloat16* x, uint8_t* data, float* scale, const Shape* s) {          \
    quantize<BITS>(x, data, scale, *s);                                                                      \
  }                                                                                                          \
  void dequantize_##KIND##_float32(const uint8_t* data, const float* scale, float* out, const Shape* s) {    \
    dequantize<BITS>(data, scale, out, *s);                                                                  \
  }                                                                                                          \
  void dequantize_##KIND##_bfloat16(const uint8_t* data, const float* scale, BFloat16* out, const Shape* s) { \
    dequantize<BITS>(data, scale, out, *s);                                                                  \
  }                                                                                                          \
  void add_##KIND(const uint8_t* data, const float* scale, uint8_t* total, float* scales, const Shape* s) {  \
    add<BITS>(data, scale, total, scales, *s);                                                               \
  }

OF_KIND(int8, 8)
OF_KIND(int4, 4)
}
