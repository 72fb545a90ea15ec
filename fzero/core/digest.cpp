#include <array>
#include <cstdint>
#include <cstring>

#if defined(__SSE4_2__) && defined(__x86_64__) && !defined(TABLES)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32) && !defined(TABLES)
#include <arm_acle.h>
#endif

// CRC-32C (Castagnoli), the bits of the packages crc32c and google_crc32c: polynomial 0x1EDC6F41, reflected.
//
// Where the processor has an instruction for it, that; else by tables, 8 bytes at a time. With TABLES defined, by tables.
// Ref: Kounavis and Berry 2005, "A systematic approach to building high performance software-based CRC generators".
namespace {

#if defined(__SSE4_2__) && defined(__x86_64__) && !defined(TABLES)
inline uint32_t add_byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
inline uint32_t add_word(uint32_t crc, uint64_t word) { return uint32_t(_mm_crc32_u64(crc, word)); }
#elif defined(__ARM_FEATURE_CRC32) && !defined(TABLES)
inline uint32_t add_byte(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
inline uint32_t add_word(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
#else
// table[k][b]: what byte b amounts to with k zero bytes behind it.
constexpr auto table = [] {
  std::array<std::array<uint32_t, 256>, 8> out{};
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0u);
    out[0][b] = crc;
  }
  for (int k = 1; k < 8; k++)
    for (uint32_t b = 0; b < 256; b++) out[k][b] = (out[k - 1][b] >> 8) ^ out[0][out[k - 1][b] & 0xFF];
  return out;
}();

inline uint32_t add_byte(uint32_t crc, uint8_t byte) { return (crc >> 8) ^ table[0][(crc ^ byte) & 0xFF]; }

inline uint32_t add_word(uint32_t crc, uint64_t word) {
  word ^= crc;
  uint32_t out = 0;
  for (int k = 0; k < 8; k++) out ^= table[7 - k][(word >> (8 * k)) & 0xFF];
  return out;
}
#endif

}  // namespace

// The checksum of n bytes that follow those whose checksum is `value`; 0 if none do. Words are of little-endian order.
extern "C" uint32_t crc32c(const uint8_t* data, uint64_t n, uint32_t value) {
  uint32_t crc = ~value;
  for (; n >= 8; n -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    crc = add_word(crc, word);
  }
  for (; n; n--, data++) crc = add_byte(crc, *data);
  return ~crc;
}

// The digest of digest.py: a sum over elements of a mix of their bits with their place in the whole leaf, modulo 2^64.
//
// Sums of integers are the same in any order, so vectors of any width and blocks of any shape give one value.
namespace {

constexpr uint64_t K1 = 0x9E3779B97F4A7C15u, K2 = 0xBF58476D1CE4E5B9u;

inline uint64_t mixed(uint64_t bits, uint64_t place) {
  uint64_t z = bits + place;
  z = (z ^ (z >> 32)) * K2;
  return z ^ (z >> 29);
}

// The sum over n elements that are `skip` apart in memory; their places, K1 (global index + 1), begin at `place` and
// are `step` apart.
template <typename Word>
uint64_t run(const Word* x, int64_t n, int64_t skip, uint64_t place, uint64_t step) {
  uint64_t sum = 0;
  if (skip == 1)
#pragma GCC unroll 4  // half as fast again for narrow words from memory
    for (int64_t i = 0; i < n; i++, place += step) sum += mixed(x[i], place);
  else
    for (int64_t i = 0; i < n; i++, place += step) sum += mixed(x[i * skip], place);
  return sum;
}

// Walk over at least one dim, outermost first. Per dim: size, skip (stride in memory) and step (stride in the whole
// leaf), in elements.
template <typename Word>
uint64_t walk(const Word* x, int64_t dims, const int64_t* sizes, const int64_t* skips, const int64_t* steps,
              uint64_t index) {
  if (dims == 1) return run(x, sizes[0], skips[0], K1 * (index + 1), K1 * uint64_t(steps[0]));
  uint64_t sum = 0;
  for (int64_t i = 0; i < sizes[0]; i++)
    sum += walk(x + i * skips[0], dims - 1, sizes + 1, skips + 1, steps + 1, index + i * steps[0]);
  return sum;
}

}  // namespace

extern "C" uint64_t digest(const void* x, int64_t width, int64_t dims, const int64_t* sizes, const int64_t* skips,
                           const int64_t* steps, int64_t first) {
  switch (width) {
    case 1: return walk(static_cast<const uint8_t*>(x), dims, sizes, skips, steps, first);
    case 2: return walk(static_cast<const uint16_t*>(x), dims, sizes, skips, steps, first);
    case 4: return walk(static_cast<const uint32_t*>(x), dims, sizes, skips, steps, first);
    default: return walk(static_cast<const uint64_t*>(x), dims, sizes, skips, steps, first);
  }
}
