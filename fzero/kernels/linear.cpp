// Products whose sums have one order, fixed by the length K that is summed over, whatever the rows beside a row are.
//
// `columns`: out[m, n] = x[m] w[:, n] is a chain of fused multiply-adds over k = 0, 1, ... in float32. Registers hold
// tiles of rows by columns, and a tile takes some k at a time, which changes no chain. `rows`: out[m, v] = x[m] w[v]
// has a chain for each k modulo 16, which `sums` of lanes.h adds up. Threads share the columns.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bits.h"
#include "lanes.h"
#include "tiles.h"

namespace {

constexpr int64_t FEW = 32;          // rows for which w is read as it lies
constexpr int64_t DEPTH = 256;       // k that a tile takes of a panel at a time
constexpr int64_t SHALLOW = 32;      // and of w as it lies, whose rows are as many streams of memory
constexpr int64_t BLOCK = 192;       // rows whose sums lie in a core's cache

struct Shape { int64_t m, k, n, w_stride, threads, wide; };  // wide: the result is float32

// Few rows: all columns from `first` to `end`, some k at a time; c [m, ldc] is zeros and begins with column `first`.
template <typename W>
void few(const Shape& s, const float* x, const W* w, int64_t first, int64_t end, float* c, int64_t ldc) {
  constexpr int64_t STRIP = 4 * WIDE;  // vectors of one row
  // The same bytes of the next rows: memory is read in pieces of rows, which no processor foresees; the long pieces of
  // one row in float32 come sooner without.
  const int64_t ahead = s.m > 1 || sizeof(W) < sizeof(float) ? SHALLOW * s.w_stride : 0;
  std::vector<W> last(SHALLOW * LANES);
  for (int64_t k = 0; k < s.k; k += SHALLOW) {
    const int64_t depth = std::min(SHALLOW, s.k - k);
    const W* from = w + k * s.w_stride;
    int64_t n = first;
    if (s.m <= 2)
      for (; n + STRIP * LANES <= end; n += STRIP * LANES) {
        if (s.m == 1) tile<1, STRIP>(depth, x + k, s.k, from + n, s.w_stride, c + n - first, ldc, ahead);
        else
          for (int64_t half : {int64_t(0), STRIP / 2 * LANES})
            tile<2, STRIP / 2>(depth, x + k, s.k, from + n + half, s.w_stride, c + n + half - first, ldc, ahead);
      }
    for (; n + PANEL <= end; n += PANEL) tiles<WIDE>(s.m, depth, x + k, s.k, from + n, s.w_stride, c + n - first, ldc, ahead);
    for (; n + LANES <= end; n += LANES) tiles<1>(s.m, depth, x + k, s.k, from + n, s.w_stride, c + n - first, ldc);
    if (n == end) continue;
    for (int64_t i = 0; i < depth; i++) std::copy(from + i * s.w_stride + n, from + i * s.w_stride + end, &last[i * LANES]);
    tiles<1>(s.m, depth, x + k, s.k, last.data(), LANES, c + n - first, ldc);
  }
}

// A panel of columns, laid out once: all rows, in blocks whose sums stay in a cache.
template <typename W, typename T>
void panel(const Shape& s, const float* x, const W* w, int64_t n, float* laid, float* c, T* out) {
  const int64_t columns = std::min(PANEL, s.n - n);
  for (int64_t k = 0; k < s.k; k++) {
    widen(w + k * s.w_stride + n, columns, laid + k * PANEL);
    std::fill(laid + k * PANEL + columns, laid + (k + 1) * PANEL, 0.0f);
  }
  for (int64_t m = 0; m < s.m; m += BLOCK) {
    const int64_t rows = std::min(BLOCK, s.m - m);
    std::fill(c, c + rows * PANEL, 0.0f);
    for (int64_t k = 0; k < s.k; k += DEPTH)
      tiles<WIDE>(rows, std::min(DEPTH, s.k - k), x + m * s.k + k, s.k, laid + k * PANEL, PANEL, c, PANEL);
    for (int64_t r = 0; r < rows; r++) round_to(c + r * PANEL, columns, out + (m + r) * s.n + n);
  }
}

template <typename W, typename T> void columns(const float* x, const W* w, T* out, const Shape& s) {
  if (s.m <= FEW) {
    const int64_t share = (s.n + s.threads * PANEL - 1) / (s.threads * PANEL) * PANEL;
#pragma omp parallel for num_threads(int(s.threads)) if (s.threads > 1)
    for (int64_t first = 0; first < s.n; first += share) {
      const int64_t end = std::min(first + share, s.n), ldc = (end - first + LANES - 1) / LANES * LANES;
      std::vector<float> c(s.m * ldc);
      few(s, x, w, first, end, c.data(), ldc);
      for (int64_t m = 0; m < s.m; m++) round_to(&c[m * ldc], end - first, out + m * s.n + first);
    }
    return;
  }
#pragma omp parallel num_threads(int(s.threads)) if (s.threads > 1)
  {
    std::vector<float> laid(s.k * PANEL), c(BLOCK * PANEL);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < s.n; n += PANEL) panel(s, x, w, n, laid.data(), c.data(), out);
  }
}

// ---- x times the transpose of w -------------------------------------------------------------------------------------

// The products of all rows of x with rows v to v + count of w, count up to GROUP.
template <typename W, typename T>
void group(const Shape& s, const float* x, int64_t first, int64_t end, const W* w, int64_t ldw, int64_t v, int64_t count,
           T* out) {
  const W* of[GROUP];
  for (int64_t j = 0; j < GROUP; j++) of[j] = w + std::min(j, count - 1) * ldw;
  for (int64_t m = first; m < end; m += GROUP) {
    const int64_t rows = std::min(GROUP, end - m);
    Quarter found[GROUP];
    const float* from = x + m * s.k;
    if (rows == 4) dots<4>(s.k, from, s.k, of, found);
    else if (rows == 3) dots<3>(s.k, from, s.k, of, found);
    else if (rows == 2) dots<2>(s.k, from, s.k, of, found);
    else dots<1>(s.k, from, s.k, of, found);
    for (int64_t r = 0; r < rows; r++) {
      float numbers[GROUP];
      std::memcpy(numbers, &found[r], sizeof numbers);
      round_to(numbers, count, out + (m + r) * s.n + v);
    }
  }
}

template <typename W, typename T> void rows(const float* x, const W* w, T* out, const Shape& s) {
  constexpr int64_t WORDS = 16;            // rows of w that meet a block of x
  constexpr int64_t NUMBERS = 96 * 1024;   // of that block, so that it lies in a core's cache
  const bool lays = !std::is_same_v<W, float> && s.m > GROUP;
  const int64_t step = std::max(GROUP, NUMBERS / s.k / GROUP * GROUP);
#pragma omp parallel num_threads(int(s.threads)) if (s.threads > 1)
  {
    std::vector<float> laid(lays ? WORDS * s.k : 0);
    for (int64_t m = 0; m < s.m; m += step) {
      const int64_t end = std::min(m + step, s.m);
#pragma omp for schedule(static) nowait
      for (int64_t v = 0; v < s.n; v += WORDS) {
        const int64_t count = std::min(WORDS, s.n - v);
        for (int64_t j = 0; lays && j < count; j++) widen(w + (v + j) * s.w_stride, s.k, &laid[j * s.k]);
        for (int64_t j = 0; j < count; j += GROUP) {
          const int64_t some = std::min(GROUP, count - j);
          if (lays) group(s, x, m, end, static_cast<const float*>(&laid[j * s.k]), s.k, v + j, some, out);
          else group(s, x, m, end, w + (v + j) * s.w_stride, s.w_stride, v + j, some, out);
        }
      }
    }
  }
}

}  // namespace

#define OF(W, NAME, KIND)                                                            \
  extern "C" void KIND##_##NAME(const W* x, const W* w, void* out, const Shape* s) { \
    std::vector<float> memory;                                                       \
    const float* numbers = in_float(x, s->m * s->k, memory);                         \
    if (s->wide) KIND(numbers, w, static_cast<float*>(out), *s);                     \
    else KIND(numbers, w, static_cast<W*>(out), *s);                                 \
  }
OF(float, float32, columns)
OF(BFloat16, bfloat16, columns)
OF(float, float32, rows)
OF(BFloat16, bfloat16, rows)
