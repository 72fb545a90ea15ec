// The digest of digest.py: a sum over elements of a mix of their bits with their place in the whole leaf, modulo 2^64.
//
// Sums of integers are the same in any order, so vectors of any width and blocks of any shape give one value.
#include <cstdint>

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
