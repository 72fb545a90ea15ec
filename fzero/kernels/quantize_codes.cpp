// Blocks of numbers to codes of eight or four bits and back, as quantize_codes.py defines them, in one pass over memory.
// A row has n numbers and ceil(n / block) blocks, the last of which may be shorter; rows are contiguous. Each operation
// is rounded by itself, so the bits are those of the definition, whatever the number of threads.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "bits.h"

namespace {

constexpr int64_t LARGEST_BLOCK = 8192;
constexpr int64_t FEW = 1 << 15;  // numbers up to which one thread does all of it
constexpr int64_t FEW_CODES = 64;  // an even number
constexpr float SMALLEST = 0x1p-126f;
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: y + ROUNDER is y to nearest, ties to even, in its low bits

struct Shape {
  int64_t rows, n, block, threads, parts;
  const float* values;   // that codes stand for where they are no integers: 16 levels, or float8's 256 numbers
  const float* between;  // 15, of which a level's number is that of those below it

  int64_t blocks() const { return (n + block - 1) / block; }
};

// A kind of code: its bits, whether it is the number of a level, and for float8 the bits of the mantissa and float32's
// exponent field of the smallest normal number.
template <int BITS, bool LEVELS, int MANTISSA, int LOWEST> struct Kind {
  static constexpr int bits = BITS, mantissa = MANTISSA, lowest = LOWEST;
  static constexpr bool levels = LEVELS;
};
struct Int8 : Kind<8, false, 0, 0> { static constexpr float largest = 127.0f; };
struct Int4 : Kind<4, false, 0, 0> { static constexpr float largest = 7.0f; };
struct Nf4 : Kind<4, true, 0, 0> { static constexpr float largest = 1.0f; };
struct E4m3 : Kind<8, false, 3, 121> { static constexpr float largest = 448.0f; };
struct E5m2 : Kind<8, false, 2, 113> { static constexpr float largest = 57344.0f; };

template <typename K> int64_t width(int64_t numbers) { return K::bits == 4 ? (numbers + 1) / 2 : numbers; }

// The code of y = x / scale, |y| at most the largest code and a rounding of it.
template <typename K> uint32_t code_of(float y, const float* between) {
  if constexpr (K::levels) {
    // By halves: where y lies says which number is the middle of the next half.
    const float* b = between;
    const bool k3 = b[7] < y;
    const bool k2 = choose(k3, b[11], b[3]) < y;
    const bool k1 = choose(k2, choose(k3, b[13], b[5]), choose(k3, b[9], b[1])) < y;
    const float above = choose(k2, choose(k1, b[14], b[12]), choose(k1, b[10], b[8]));
    const float below = choose(k2, choose(k1, b[6], b[4]), choose(k1, b[2], b[0]));
    const bool k0 = choose(k3, above, below) < y;
    return uint32_t(k3) << 3 | uint32_t(k2) << 2 | uint32_t(k1) << 1 | uint32_t(k0);
  } else if constexpr (K::mantissa > 0) {
    const uint32_t u = bits(y), given = u & 0x7fffffffu, most = bits(K::largest);
    const uint32_t size = choose(given > most, most, given), field = size >> 23;
    const uint32_t exponent = choose(field < uint32_t(K::lowest), uint32_t(K::lowest), field);
    const float step = real((254u + K::mantissa - exponent) << 23);  // 1 / (the distance of float8's numbers around y)
    const uint32_t whole = bits(real(size) * step + ROUNDER) - bits(ROUNDER);
    return (((exponent - K::lowest) << K::mantissa) + whole) | ((u >> 24) & 0x80u);
  } else {
    return bits(y + ROUNDER) & (K::bits == 4 ? 15u : 255u);  // below the largest + 1/2: the low bits of the sum
  }
}

// The codes of `count` numbers, which are one block; returns their scale.
template <typename K> float encode(const float* x, int64_t count, uint8_t* data, const Shape& s) {
  uint32_t magnitude = 0;  // ordered as the numbers are, with infinity and NaN at the top
#pragma omp simd reduction(max : magnitude)
  for (int64_t i = 0; i < count; ++i) magnitude = std::max(magnitude, bits(x[i]) & 0x7fffffffu);
  const bool finite = magnitude < 0x7f800000u;
  const float scale = std::max(real(magnitude) / K::largest, SMALLEST), inverse = 1.0f / scale;
  float between[15] = {};
  if constexpr (K::levels) std::copy_n(s.between, 15, between);
  const auto code = [&](int64_t i) { return code_of<K>(x[i] * inverse, between); };
  if (!finite) {  // the codes of zeros
    const uint32_t zero = code_of<K>(0.0f, between);
    std::memset(data, int(K::bits == 4 ? zero | zero << 4 : zero), width<K>(count));
    if (K::bits == 4 && count % 2) data[count / 2] = uint8_t(zero);
    return std::numeric_limits<float>::infinity();
  }
  if constexpr (K::bits == 8) {
    for (int64_t from = 0; from < count; from += FEW_CODES) {  // in memory that nothing else can be
      const int64_t some = std::min(FEW_CODES, count - from);
      uint8_t codes[FEW_CODES];
#pragma omp simd
      for (int64_t i = 0; i < some; ++i) codes[i] = uint8_t(code(from + i));
      std::memcpy(data + from, codes, some);
    }
  } else {
    for (int64_t from = 0; from < count; from += FEW_CODES) {  // one by one, which fills vectors, and then in pairs
      const int64_t some = std::min(FEW_CODES, count - from);
      uint8_t codes[FEW_CODES + 1];
#pragma omp simd
      for (int64_t i = 0; i < some; ++i) codes[i] = uint8_t(code(from + i));
      codes[some] = 0;
#pragma omp simd
      for (int64_t i = 0; i < (some + 1) / 2; ++i) data[from / 2 + i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  }
  return scale;
}

// put(i, what the code of number i stands for) for one block.
template <typename K, typename Put>
void decode(const uint8_t* data, float scale, int64_t count, const Shape& s, Put put) {
  const auto value = [&](uint8_t byte, bool high) {
    if constexpr (K::levels || K::mantissa > 0) return s.values[K::bits == 8 ? byte : high ? byte >> 4 : byte & 15];
    else if constexpr (K::bits == 8) return float(int8_t(byte));
    else return float(int8_t(high ? byte : byte << 4) >> 4);
  };
  if constexpr (K::bits == 8) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) put(i, value(data[i], false) * scale);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count / 2; ++i) {
      put(2 * i, value(data[i], false) * scale);
      put(2 * i + 1, value(data[i], true) * scale);
    }
    if (count % 2) put(count - 1, value(data[count / 2], false) * scale);
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

template <typename K, typename T> void quantize(const T* x, uint8_t* data, float* scale, const Shape& s) {
  each_block(s, [&](int64_t i, int64_t row, int64_t first, int64_t count) {
    const T* given = x + row * s.n + first;
    uint8_t* codes = data + row * width<K>(s.n) + width<K>(first);
    if constexpr (std::is_same_v<T, float>) {
      scale[i] = encode<K>(given, count, codes, s);
    } else {  // in float32 once, not in each of the loops of encode
      float values[LARGEST_BLOCK];
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) values[j] = wide(given[j]);
      scale[i] = encode<K>(values, count, codes, s);
    }
  });
}

template <typename K, typename T> void dequantize(const uint8_t* data, const float* scale, T* out, const Shape& s) {
  each_block(s, [&](int64_t i, int64_t row, int64_t first, int64_t count) {
    T* to = out + row * s.n + first;
    decode<K>(data + row * width<K>(s.n) + width<K>(first), scale[i], count, s,
              [&](int64_t at, float value) { narrow(value, to[at]); });
  });
}

// The codes of the sum of `parts` tensors, added in order.
template <typename K>
void add(const uint8_t* data, const float* scale, uint8_t* total, float* total_scale, const Shape& s) {
  const int64_t bytes = s.rows * width<K>(s.n), scales = s.rows * s.blocks();
  each_block(s, [&](int64_t i, int64_t row, int64_t first, int64_t count) {
    float sum[LARGEST_BLOCK];
    std::fill(sum, sum + count, 0.0f);
    const int64_t at = row * width<K>(s.n) + width<K>(first);
    for (int64_t part = 0; part < s.parts; ++part) {
      decode<K>(data + part * bytes + at, scale[part * scales + i], count, s,
                [&](int64_t j, float value) { sum[j] += value; });
    }
    total_scale[i] = encode<K>(sum, count, total + at, s);
  });
}

}  // namespace

extern "C" {

#define OF_TYPE(NAME, K, TYPE, T)                                                                            \
  void quantize_##NAME##_##TYPE(const T* x, uint8_t* data, float* scale, const Shape* s) {                   \
    quantize<K>(x, data, scale, *s);                                                                         \
  }                                                                                                          \
  void dequantize_##NAME##_##TYPE(const uint8_t* data, const float* scale, T* out, const Shape* s) {         \
    dequantize<K>(data, scale, out, *s);                                                                     \
  }
#define OF_KIND(NAME, K)                                                                                     \
  OF_TYPE(NAME, K, float32, float)                                                                           \
  OF_TYPE(NAME, K, bfloat16, BFloat16)                                                                       \
  OF_TYPE(NAME, K, float16, Float16)                                                                         \
  void add_##NAME(const uint8_t* data, const float* scale, uint8_t* total, float* scales, const Shape* s) {  \
    add<K>(data, scale, total, scales, *s);                                                                  \
  }

OF_KIND(int8, Int8)
OF_KIND(int4, Int4)
OF_KIND(nf4, Nf4)
OF_KIND(fp8_e4m3, E4m3)
OF_KIND(fp8_e5m2, E5m2)
}
