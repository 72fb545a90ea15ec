// Whether torch's brgemm, products of tiles in a core's cache, works on this CPU. A file of its own, as it compiles in a
// sixth of the time of the attention that uses them, and a run asks before it needs that.
#include <ATen/native/CPUBlas.h>

#include <exception>
#include <vector>

template <typename T>
bool works() {
  try {
    std::vector<T> x(1024, T(0));
    std::vector<float> y(1024);
    at::native::cpublas::brgemm(32, 32, 32, 32, 32, 32, false, x.data(), x.data(), y.data());
    at::native::cpublas::brgemm_release();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

extern "C" int works_bfloat16() { return works<at::BFloat16>(); }
extern "C" int works_float32() { return works<float>(); }
