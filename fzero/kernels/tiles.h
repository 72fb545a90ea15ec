// Tiles of a product in registers: each element a chain of fused multiply-adds, or sixteen of them. Included once, after lanes.h.

namespace {

// Of a tile in registers: 24 vectors of 32 with AVX-512, 12 of 16 with AVX2.
constexpr int64_t ROWS = 6;
#if defined(__AVX512F__)
constexpr int64_t WIDE = 4;
#else
constexpr int64_t WIDE = 1;
#endif
constexpr int64_t PANEL = WIDE * LANES;
template <typename W> constexpr int64_t LINE = 64 / int64_t(sizeof(W));  // numbers of a line of a cache

// c [R, C vectors] += x [R, k] w [k, C vectors]; the numbers `ahead` of those of w are called into the cache, unless 0.
template <int64_t R, int64_t C, typename W>
void tile(int64_t k, const float* x, int64_t ldx, const W* w, int64_t ldw, float* c, int64_t ldc, int64_t ahead = 0) {
  Vector total[R][C];
#pragma GCC unroll 16
  for (int64_t r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int64_t j = 0; j < C; j++) total[r][j] = load(c + r * ldc + j * LANES);
  for (int64_t i = 0; i < k; i++, w += ldw) {
    for (int64_t j = 0; ahead && j < C * LANES; j += LINE<W>) __builtin_prefetch(w + ahead + j);
    Vector right[C];
#pragma GCC unroll 16
    for (int64_t j = 0; j < C; j++) right[j] = load(w + j * LANES);
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; r++) {
      const Vector left = x[r * ldx + i] - Vector{};
#pragma GCC unroll 16
      for (int64_t j = 0; j < C; j++) total[r][j] = fused(left, right[j], total[r][j]);
    }
  }
#pragma GCC unroll 16
  for (int64_t r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int64_t j = 0; j < C; j++) store(c + r * ldc + j * LANES, total[r][j]);
}

template <int64_t C, typename W>
void tiles(int64_t rows, int64_t k, const float* x, int64_t ldx, const W* w, int64_t ldw, float* c, int64_t ldc,
           int64_t ahead = 0) {
  for (; rows >= ROWS; rows -= ROWS, x += ROWS * ldx, c += ROWS * ldc, ahead = 0) tile<ROWS, C>(k, x, ldx, w, ldw, c, ldc, ahead);
  switch (rows) {
    case 5: return tile<5, C>(k, x, ldx, w, ldw, c, ldc, ahead);
    case 4: return tile<4, C>(k, x, ldx, w, ldw, c, ldc, ahead);
    case 3: return tile<3, C>(k, x, ldx, w, ldw, c, ldc, ahead);
    case 2: return tile<2, C>(k, x, ldx, w, ldw, c, ldc, ahead);
    case 1: return tile<1, C>(k, x, ldx, w, ldw, c, ldc, ahead);
  }
}

template <typename W> void widen(const W* from, int64_t count, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) to[i] = wide(from[i]);
}
// The numbers in float32, in `memory` unless they are.
template <typename T> const float* in_float(const T* x, int64_t count, std::vector<float>& memory) {
  if constexpr (std::is_same_v<T, float>) return x;
  else {
    memory.resize(count);
    widen(x, count, memory.data());
    return memory.data();
  }
}
template <typename T> void round_to(const float* from, int64_t count, T* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) narrow(from[i], to[i]);
}

// ---- x times the transpose of w: sums of lanes

constexpr int64_t GROUP = 4;  // rows of w, and of x, of a tile

// out[r] = the products of R rows of x with four of w.
template <int64_t R, typename W>
void dots(int64_t k, const float* x, int64_t ldx, const W* const* w, Quarter* out) {
  Vector total[R][GROUP] = {};
  int64_t i = 0;
  const auto add = [&](const Vector* left, const Vector* right) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int64_t j = 0; j < GROUP; j++) total[r][j] = fused(left[r], right[j], total[r][j]);
  };
  for (; i + LANES <= k; i += LANES) {
    Vector left[R], right[GROUP];
    if (i % LINE<W> == 0)
      for (int64_t j = 0; j < GROUP; j++) __builtin_prefetch(w[j] + i + GROUP * k);
#pragma GCC unroll 4
    for (int64_t j = 0; j < GROUP; j++) right[j] = load(w[j] + i);
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; r++) left[r] = load(x + r * ldx + i);
    add(left, right);
  }
  if (i < k) {
    Vector left[R], right[GROUP];
    for (int64_t j = 0; j < GROUP; j++) right[j] = load(w[j] + i, k - i);
    for (int64_t r = 0; r < R; r++) left[r] = load(x + r * ldx + i, k - i);
    add(left, right);
  }
  for (int64_t r = 0; r < R; r++) out[r] = sums(total[r][0], total[r][1], total[r][2], total[r][3]);
}

}  // namespace
