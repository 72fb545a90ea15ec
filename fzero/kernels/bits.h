// Numbers, their bits, bfloat16 and float16, for the C++ of this folder. Included once, after the standard headers.
#include <cstdint>
#include <cstring>

namespace {

struct BFloat16 { uint16_t x; };
struct Float16 { uint16_t x; };

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

// A float16 has float32's bits behind its sign, 13 to the left, but for the bias of the exponent: a factor of 2^112.
float wide(Float16 x) {
  const uint32_t size = uint32_t(x.x & 0x7fffu) << 13, sign = uint32_t(x.x & 0x8000u) << 16;
  return real(choose(size >= 0x0f800000u, size | 0x7f800000u, bits(real(size) * 0x1p112f)) | sign);
}

// To nearest, ties to even. Below 2^-14 the sum with 1/2 rounds where the steps of the subnormal numbers are.
void narrow(float x, Float16& out) {
  const uint32_t size = bits(x) & 0x7fffffffu, sign = (bits(x) >> 16) & 0x8000u;
  const uint32_t normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  const uint32_t small = bits(real(size) + 0.5f) - 0x3f000000u;
  const uint32_t large = choose(size > 0x7f800000u, 0x7e00u, 0x7c00u);
  out.x = uint16_t(choose(size >= 0x47800000u, large, choose(size < 0x38800000u, small, normal)) | sign);
}

}  // namespace
