// Numbers, their bits, and bfloat16, for the C++ of this folder. Included once, after the standard headers.
#include <cstdint>
#include <cstring>

namespace {

struct BFloat16 { uint16_t x; };

uint32_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

float real(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// The bits of the bfloat16 nearest to x, ties to even; NaN stays NaN.
uint16_t nearest(float x) {
  return x == x ? uint16_t((bits(x) + 0x7fffu + ((bits(x) >> 16) & 1u)) >> 16) : uint16_t(0x7fc0);
}

float wide(BFloat16 x) { return real(uint32_t(x.x) << 16); }
float wide(float x) { return x; }
double wide(double x) { return x; }

void narrow(float x, BFloat16& out) { out.x = nearest(x); }
void narrow(float x, float& out) { out = x; }
void narrow(double x, double& out) { out = x; }

// `yes` or `no` by a mask: a choice between results of a few operations is a branch to GCC, which then leaves the loops
// around it scalar on a CPU without AVX-512.
uint32_t choose(bool which, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - uint32_t(which);
  return (yes & mask) | (no & ~mask);
}
float choose(bool which, float yes, float no) { return real(choose(which, bits(yes), bits(no))); }

}  // namespace
