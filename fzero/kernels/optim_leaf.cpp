// One step of AdamW or Lion on leaves in memory, in one pass over it: the equations of optim_leaf.py, the encodings of
// optim_lowbit.py.
//
// Every operation is elementwise and rounded separately (compile without contraction of products and sums): the bits of
// an element depend neither on its position, nor on the sharding of a leaf, nor on the vector width, nor on the number
// of threads. Work is numbered through all leaves in stretches of STRETCH elements; `step` finds a stretch's leaf by
// binary search in the running sum of stretches.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bits.h"

namespace {

constexpr int64_t TILE = 256;         // elements at a time: other dtypes become float32 in the first-level cache
constexpr int64_t STRETCH = 1 << 15;  // elements of a thread's piece of work
constexpr int64_t LARGEST = 4096;     // block of codes

enum Type : int64_t { NONE, FLOAT32, BFLOAT16, FLOAT16, CODES };

struct Leaf {
  float* p;
  const void* g;
  void *m, *v;                 // v is null for Lion
  float *m_scales, *v_scales;  // of codes: one for each block of a row
  void* copy;
  int64_t n, columns;
  int64_t gradient, state, copied;  // Types
  int64_t stochastic, key[2], first, size0, stride0, size1, stride1;  // a Place
  double decay;
};

struct Rates {
  float rate, correct1, root_correct2, b1, c1, b2, c2, eps, factor;
  int32_t coupled;
  int64_t count, block, threads;
};

// ---- the equations ----

enum Decay { WITHOUT, APART, COUPLED };

template <Decay DECAY>
void adamw(float* __restrict p, const float* __restrict g_, float* __restrict m_, float* __restrict v_, int64_t n,
           float decay, const Rates& r) {
  const float b1 = r.b1, c1 = r.c1, b2 = r.b2, c2 = r.c2, eps = r.eps, factor = r.factor;
  const float root_correct2 = r.root_correct2;
  const float rate = -(r.rate / r.correct1), shrink = r.rate * decay;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float g = g_[i] * factor;
    if (DECAY == COUPLED) g += decay * p[i];
    const float m = b1 * m_[i] + c1 * g, v = b2 * v_[i] + c2 * (g * g);
    const float root = choose(v > 0.0f, std::sqrt(v), v * 0.0f);
    float u = rate * (m / (root / root_correct2 + eps));
    if (DECAY == APART) u -= shrink * p[i];
    p[i] += u, m_[i] = m, v_[i] = v;
  }
}

template <Decay DECAY>
void lion(float* __restrict p, const float* __restrict g_, float* __restrict m_, int64_t n, float decay,
          const Rates& r) {
  const float b1 = r.b1, c1 = r.c1, b2 = r.b2, c2 = r.c2, factor = r.factor, rate = -r.rate;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const float g = g_[i] * factor, c = b1 * m_[i] + c1 * g;
    float direction = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : 0.0f;  // 0 for NaN, as torch.sign
    if (DECAY != WITHOUT) direction += decay * p[i];
    p[i] += rate * direction, m_[i] = b2 * m_[i] + c2 * g;
  }
}

void update(const Leaf& x, const Rates& r, float* p, const float* g, float* m, float* v, int64_t n) {
  const float decay = x.decay;
  if (!v) return (decay != 0.0f ? lion<APART> : lion<WITHOUT>)(p, g, m, n, decay, r);
  (decay == 0.0f ? adamw<WITHOUT> : r.coupled ? adamw<COUPLED> : adamw<APART>)(p, g, m, v, n, decay, r);
}

// ---- 16 bits ----

void widen(const uint16_t* __restrict x, float* __restrict out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) out[i] = real(uint32_t(x[i]) << 16);
}

void narrow(const float* __restrict x, uint16_t* __restrict out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) out[i] = nearest(x[i]);
}

// Rounds to float16. For subnormal results add 1/2: the sum's last place is then that of float16, so the addition
// rounds correctly.
uint16_t half(float x) {
  const uint32_t size = bits(x) & 0x7fffffffu, sign = (bits(x) >> 16) & 0x8000u;
  const uint32_t normal = std::min(((size + 0xfffu + ((size >> 13) & 1u)) >> 13) - (112u << 10), 0x7c00u);
  const uint32_t small = bits(real(size) + 0.5f) - 0x3f000000u;
  return uint16_t(sign | choose(size > 0x7f800000u, 0x7e00u, choose(size < 0x38800000u, small, normal)));
}

void halve(const float* __restrict x, uint16_t* __restrict out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) out[i] = half(x[i]);
}

// Rounds stochastically, by 16 bits of each word from bit SHIFT on.
template <int SHIFT>
void narrow(const float* __restrict x, const uint32_t* __restrict words, uint16_t* __restrict out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const uint32_t raw = bits(x[i]), rounded = (raw + ((words[i] >> SHIFT) & 0xffffu)) >> 16;
    out[i] = (raw & 0x7f800000u) != 0x7f800000u ? uint16_t(rounded) : nearest(x[i]);
  }
}

// Philox4x32-10 as in prng.py: out[4 j ... 4 j + 3] are the words of the block with the counter (first + j, 0,
// purpose). A word is the lower half of 64 bits, because vector units multiply 64-bit lanes.
void philox(uint64_t first, uint64_t purpose, const uint32_t* key, uint32_t* __restrict out, int64_t blocks) {
  constexpr uint64_t low = 0xffffffffu;
  const uint64_t key0 = key[0], key1 = key[1];
#pragma omp simd
  for (int64_t j = 0; j < blocks; j++) {
    const uint64_t block = first + j;
    uint64_t c0 = block & low, c1 = block >> 32, c2 = 0, c3 = purpose, k0 = key0, k1 = key1;
    for (int round = 0; round < 10; round++) {
      const uint64_t p0 = c0 * 0xD2511F53u, p1 = c2 * 0xCD9E8D57u;
      c0 = (p1 >> 32) ^ c1 ^ k0, c1 = p1 & low, c2 = (p0 >> 32) ^ c3 ^ k1, c3 = p0 & low;
      k0 = (k0 + 0x9E3779B9u) & low, k1 = (k1 + 0xBB67AE85u) & low;
    }
    out[4 * j] = c0, out[4 * j + 1] = c1, out[4 * j + 2] = c2, out[4 * j + 3] = c3;
  }
}

// The words of the local elements at, at + 1, ..., drawn in runs of consecutive global indices (see Place in
// optim_lowbit.py).
void draw(const Leaf& x, const uint32_t* key, int64_t at, int64_t n, uint32_t* out) {
  uint32_t drawn[TILE + 8];
  while (n > 0) {
    const int64_t within = at % x.size1, inside = within % x.size0;
    const int64_t index = x.first + at / x.size1 * x.stride1 + within / x.size0 * x.stride0 + inside;
    const int64_t run = std::min(n, x.size0 - inside), skip = index & 3;
    philox(uint64_t(index) >> 2, 0, key, drawn, (skip + run + 3) / 4);
    std::copy(drawn + skip, drawn + skip + run, out);
    at += run, n -= run, out += run;
  }
}

// ---- codes of a byte ----

template <bool SIGNED> constexpr int32_t LEVELS = SIGNED ? 127 : 255;

template <bool SIGNED>
void decode(const uint8_t* __restrict codes, float scale, float* __restrict out, int64_t n) {
  const int32_t top = bits(scale);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const int32_t code = codes[i], steps = code & LEVELS<SIGNED>;
    const int32_t raw = std::max(top - ((LEVELS<SIGNED> - steps) << 20), 0);
    out[i] = real(uint32_t(steps ? raw : 0) | (SIGNED ? uint32_t(code & 0x80) << 24 : 0u));
  }
}

template <bool SIGNED>
void encode(const float* __restrict x, uint8_t* __restrict codes, float* scale, int64_t n) {
  uint32_t top = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; i++) top = std::max(top, bits(x[i]) & 0x7fffffffu);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const uint32_t raw = bits(x[i]), size = raw & 0x7fffffffu;
    const int32_t code = std::max(LEVELS<SIGNED> - (int32_t(top - size + (1u << 19)) >> 20), SIGNED ? 0 : 1);
    codes[i] = uint8_t((size ? code : 0) | (SIGNED ? (raw >> 24) & 0x80u : 0u));
  }
  *scale = real(top);
}

// ---- leaves ----

void copy(const Leaf& x, int64_t at, int64_t n) {
  const float* p = x.p + at;
  if (x.copied == FLOAT32) std::copy(p, p + n, static_cast<float*>(x.copy) + at);
  if (x.copied == BFLOAT16) narrow(p, static_cast<uint16_t*>(x.copy) + at, n);
  if (x.copied == FLOAT16) halve(p, static_cast<uint16_t*>(x.copy) + at, n);
}

const float* gradient(const Leaf& x, int64_t at, int64_t n, float* to) {
  if (x.gradient == FLOAT32) return static_cast<const float*>(x.g) + at;
  widen(static_cast<const uint16_t*>(x.g) + at, to, n);
  return to;
}

// Update n <= TILE elements from `at` on, for a state in float32 or bfloat16.
void tile(const Leaf& x, const Rates& r, const uint32_t* key, int64_t at, int64_t n) {
  float wide[3][TILE];
  const float* g = gradient(x, at, n, wide[0]);
  if (x.state == FLOAT32) {
    update(x, r, x.p + at, g, static_cast<float*>(x.m) + at, x.v ? static_cast<float*>(x.v) + at : nullptr, n);
  } else {
    uint16_t *m = static_cast<uint16_t*>(x.m) + at, *v = x.v ? static_cast<uint16_t*>(x.v) + at : nullptr;
    widen(m, wide[1], n);
    if (v) widen(v, wide[2], n);
    update(x, r, x.p + at, g, wide[1], v ? wide[2] : nullptr, n);
    if (x.stochastic) {
      uint32_t words[TILE];
      draw(x, key, at, n, words);
      narrow<0>(wide[1], words, m, n);
      if (v) narrow<16>(wide[2], words, v, n);
    } else {
      narrow(wide[1], m, n);
      if (v) narrow(wide[2], v, n);
    }
  }
  copy(x, at, n);
}

int64_t across(const Leaf& x, const Rates& r) { return (x.columns + r.block - 1) / r.block; }  // blocks of a row

// Update one block of a state in 8-bit codes: block number i covers the columns from (i % across) r.block of row i /
// across.
void block(const Leaf& x, const Rates& r, int64_t number) {
  float wide[3][LARGEST];
  const int64_t column = number % across(x, r) * r.block, at = number / across(x, r) * x.columns + column;
  const int64_t n = std::min(r.block, x.columns - column);
  uint8_t *m = static_cast<uint8_t*>(x.m) + at, *v = x.v ? static_cast<uint8_t*>(x.v) + at : nullptr;
  const float* g = gradient(x, at, n, wide[0]);
  decode<true>(m, x.m_scales[number], wide[1], n);
  if (v) decode<false>(v, x.v_scales[number], wide[2], n);
  update(x, r, x.p + at, g, wide[1], v ? wide[2] : nullptr, n);
  encode<true>(wide[1], m, x.m_scales + number, n);
  if (v) encode<false>(wide[2], v, x.v_scales + number, n);
  copy(x, at, n);
}

int64_t pieces(const Leaf& x, const Rates& r) {
  if (x.state != CODES) return (x.n + STRETCH - 1) / STRETCH;
  const int64_t each = STRETCH / r.block;
  return (x.n / x.columns * across(x, r) + each - 1) / each;
}

void piece(const Leaf& x, const Rates& r, int64_t number) {
  if (x.state == CODES) {
    const int64_t each = STRETCH / r.block, end = std::min((number + 1) * each, x.n / x.columns * across(x, r));
    for (int64_t i = number * each; i < end; i++) block(x, r, i);
    return;
  }
  uint32_t key[4] = {uint32_t(x.key[0]), uint32_t(x.key[1])}, folded[4];
  if (x.stochastic) philox(uint64_t(r.count), 1, key, folded, 1);
  const int64_t end = std::min((number + 1) * STRETCH, x.n);
  for (int64_t at = number * STRETCH; at < end; at += TILE) tile(x, r, folded, at, std::min(TILE, end - at));
}

}  // namespace

extern "C" void step(const Leaf* leaves, int64_t count, const Rates* r) {
  std::vector<int64_t> ends(count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; i++) ends[i] = total += pieces(leaves[i], *r);
#pragma omp parallel for num_threads(std::max<int64_t>(1, std::min(r->threads, total))) schedule(dynamic)
  for (int64_t i = 0; i < total; i++) {
    const int64_t leaf = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
    piece(leaves[leaf], *r, i - (leaf ? ends[leaf - 1] : 0));
  }
}
