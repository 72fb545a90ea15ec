// Causal attention by tiles of scores that fit in a core's cache: forward, and backward from the log-sum-exp.
// Ref: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithms 1 and 4.
//
// q, g, out, dq [B, T, H, K]; k, v, dk, dv [B, S, G, K]; lse [B, H, T]; all contiguous; of queries and of keys apart the
// documents [B, T] and [B, S] or null, and the positions likewise; null: keys are at 0, 1, ..., and the queries are the
// last T of them, in their documents. Positions are in any order. A
// tile of scores is [KEYS, QUERIES]: element (j, x) is key s0 + j against query q0 + x. The values of each query
// (maximum, sum, log-sum-exp) then lie along a vector, and nothing is summed across its lanes. One thread handles all
// heads of a key/value group of one row of the batch (number n = b G + group) in a fixed order: results do not depend
// on the number of threads. It takes BLOCK queries at a time, so that what it lays out does not grow with T; sums of dk and
// dv alone are as long as the sequence, one head of them for each thread where they are wider than dk. Element (b, t, h, c) of q is at ((b T + t) H + h) K + c, so `at` is the start of a tile of
// queries and ldq = H K the step to the next query; k and v likewise with `from` and ldk = G K.
#include <ATen/native/CPUBlas.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <type_traits>
#include <vector>

#include "bits.h"

namespace {

namespace blas = at::native::cpublas;

constexpr int64_t QUERIES = 64, KEYS = 128;  // of a tile
constexpr int64_t BLOCK = 1024;              // queries that a thread has laid out and sums at a time

// Sums are in float, for double in double. The right operand of a bfloat16 product holds pairs of rows interleaved:
// [rows / 2, columns, 2].
template <typename T> using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <typename T> using Torch = std::conditional_t<std::is_same_v<T, BFloat16>, at::BFloat16, T>;
template <typename T> constexpr int64_t ROWS = std::is_same_v<T, BFloat16> ? 2 : 1;
template <typename T> int64_t padded(int64_t rows) { return (rows + ROWS<T> - 1) / ROWS<T> * ROWS<T>; }

// The bfloat16 nearest to x, ties away from zero: two operations fewer than ties to even, for operands of a product.
uint32_t upper(float x) { return (bits(x) + 0x8000u) >> 16; }

// 2^x, 0 below -126: the nearest whole power, by the exponent's bits, times a polynomial of the rest (relative error
// 3e-9).
float power_of_2(float x) {
  const float whole = std::nearbyint(x), r = x - whole;
  float y = 0.0555032723f + r * (0.00961805668f + r * (0.00134004282f + r * 0.000154614447f));
  y = 1.0f + r * (0.693147207f + r * (0.240226509f + r * y));
  return choose(x < -126.0f, 0.0f, real(bits(y) + (uint32_t(int32_t(whole)) << 23)));
}
double power_of_2(double x) { return std::exp2(x); }

// tanh, with a relative error of 2e-7: an odd polynomial near 0, else from the exponential.
// Ref: Moshier, Cephes mathematical library, tanhf.c.
inline float bend(float x) {
  const float given = std::fabs(x), size = choose(given > 10.0f, 10.0f, given), z = size * size;
  float near = ((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z + 1.33314422036e-1f;
  near = size + size * z * (near * z - 3.33332819422e-1f);
  const float far = 1.0f - 2.0f / (power_of_2(2.88539008f * size) + 1.0f);
  return real(bits(choose(size < 0.625f, near, far)) | (bits(x) & 0x80000000u));
}
double bend(double x) { return std::tanh(x); }

bool loops = false;  // for tests: plain loops in place of torch's products

// Whether the elements on the diagonal of a product of T have the same bits in blocks of 16 as in a tile of n queries.
template <typename T>
bool steady(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t BLOCK = 16;
  std::vector<T> numbers((m + QUERIES) * k);
  for (size_t i = 0; i < numbers.size(); i++) narrow(float(i * 7919 % 1009) / 1009.0f - 0.5f, numbers[i]);
  const auto *a = reinterpret_cast<const Torch<T>*>(numbers.data()), *b = a + m * k;
  std::vector<float> tile(m * QUERIES), block(BLOCK * BLOCK);
  blas::brgemm(m, n, k, k, QUERIES, QUERIES, false, a, b, tile.data());
  for (int64_t x = 0; x < n; x += BLOCK) {
    const int64_t some = std::min(BLOCK, n - x);
    blas::brgemm(some, some, k, k, QUERIES, BLOCK, false, a + x * k, b + x * ROWS<T>, block.data());
    for (int64_t i = 0; i < some; i++)
      if (bits(block[i * BLOCK + i]) != bits(tile[(x + i) * QUERIES + x + i])) return false;
  }
  return true;
}

// Whether torch's brgemm, products of tiles in a core's cache, works for T on this CPU. Where it has none it throws, or
// hands floats to the BLAS, whose sums have another order in another tile.
template <typename T>
bool works() {
  if constexpr (std::is_same_v<T, double>) {
    return false;
  } else {
    static const bool known = [] {
      try {
        const bool found = steady<T>(KEYS, QUERIES, 98) && steady<T>(81, 17, 64) && steady<T>(1, 1, 2);
        blas::brgemm_release();
        return found;
      } catch (const std::exception&) {
        return false;
      }
    }();
    return known;
  }
}
template <typename T> bool quick() { return !loops && works<T>(); }

// C [m, n] (+)= A [m, k] B [k, n]; k even for bfloat16.
template <typename T>
void product(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, Wide<T>* c, int64_t ldc,
             bool add) {
  if constexpr (!std::is_same_v<T, double>) {
    const auto as = [](const T* x) { return reinterpret_cast<const Torch<T>*>(x); };
    if (quick<T>()) return blas::brgemm(m, n, k, lda, ldb, ldc, add, as(a), as(b), c);
  }
  for (int64_t i = 0; i < m; i++, a += lda, c += ldc) {
    if (!add) std::fill(c, c + n, Wide<T>(0));
    for (int64_t x = 0; x < k; x++) {
      const Wide<T> left = wide(a[x]);
      const T* right = b + x / ROWS<T> * ROWS<T> * ldb + x % ROWS<T>;
#pragma omp simd
      for (int64_t j = 0; j < n; j++) c[j] += left * wide(right[j * ROWS<T>]);
    }
  }
}

// Copy x [rows, cols] as a right operand: contiguous, pairs of rows interleaved, a row of zeros added to an odd number.
template <typename T>
void lay(const T* x, int64_t ld, int64_t rows, int64_t cols, T* out) {
  for (int64_t r = 0; r < rows; r += ROWS<T>, x += ROWS<T> * ld, out += ROWS<T> * cols) {
    if constexpr (ROWS<T> == 1) {
      std::copy(x, x + cols, out);
    } else {
      const uint32_t second = r + 1 < rows ? 0xffffu : 0u;
      const T* next = second ? x + ld : x;
#pragma omp simd
      for (int64_t c = 0; c < cols; c++) out[2 * c].x = x[c].x, out[2 * c + 1].x = uint16_t(next[c].x & second);
    }
  }
}

// Write the transpose of x [rows <= QUERIES, cols] as a right operand [cols, QUERIES]; cols is even for bfloat16.
template <typename T>
void turn(const T* x, int64_t ld, int64_t rows, int64_t cols, T* out) {
  for (int64_t c = 0; c < cols; c += ROWS<T>, out += ROWS<T> * QUERIES)
    for (int64_t r = 0; r < rows; r++) std::memcpy(out + r * ROWS<T>, x + r * ld + c, ROWS<T> * sizeof(T));
}

// Write the transpose of x [rows <= KEYS, cols] as a left operand [cols, KEYS], a zero added to an odd number of rows.
template <typename T>
void transpose(const T* x, int64_t ld, int64_t rows, int64_t cols, T* out) {
  for (int64_t c = 0; c < cols; c++, out += KEYS) {
    for (int64_t r = 0; r < rows; r++) out[r] = x[r * ld + c];
    if (rows < KEYS) out[rows] = T(0);
  }
}

// delta[x] = the sum of out[x, c] g[x, c] for n queries, g turned: the diagonal of the product that makes dp, with out in
// place of the values. The sum then has the order and the rounding of dp, so that dp - delta is exactly 0 for a query that
// sees one key, whose out is that key's value. Blocks of 16 queries, as all else of the product is thrown away.
template <typename T>
void sum_rows(int64_t n, int64_t k, const T* out, int64_t ld, const T* g, Wide<T>* room, Wide<T>* delta) {
  constexpr int64_t BLOCK = 16;
  for (int64_t x = 0; x < n; x += BLOCK, out += BLOCK * ld, g += BLOCK * ROWS<T>) {
    const int64_t m = std::min(BLOCK, n - x);
    product(m, m, k, out, ld, g, QUERIES, room, BLOCK, false);
    for (int64_t i = 0; i < m; i++) delta[x + i] = room[i * BLOCK + i];
  }
}

struct Shape {
  int64_t b, t, s, h, g, k;
  int64_t kind, size, keep, near, seed, random;  // of the pattern
  int64_t threads;
  int64_t wide;  // whether the results are in Wide<T>, to be joined with others, and not in T
  double scale;
  double cap;  // of the scores, 0 for none
  int64_t padded_t() const { return (t + KEYS - 1) / KEYS * KEYS; }
  int64_t padded_s() const { return (s + KEYS - 1) / KEYS * KEYS; }
};

// Write x as element `at` of `out`, which is in T, or in Wide<T> if `as_wide`.
template <typename T>
void store(Wide<T> x, void* out, int64_t at, bool as_wide) {
  if (as_wide) static_cast<Wide<T>*>(out)[at] = x;
  else narrow(x, static_cast<T*>(out)[at]);
}

enum Kind { FULL, WINDOW, LOCAL, STRIDED, FIXED, BIGBIRD };
enum Look { NONE, SOME, ALL };

struct Span {
  int64_t low, high;
};

Span span_of(const int64_t* x, int64_t n) {
  Span span{x[0], x[0]};
  for (int64_t i = 1; i < n; i++) span.low = std::min(span.low, x[i]), span.high = std::max(span.high, x[i]);
  return span;
}

// The spans of tiles of `step` values.
std::vector<Span> spans_of(const int64_t* x, int64_t n, int64_t step) {
  std::vector<Span> spans;
  for (int64_t i = 0; x && i < n; i += step) spans.push_back(span_of(x + i, std::min(step, n - i)));
  return spans;
}

// Where the queries and keys of all rows of the batch are.
struct Places {
  const int64_t *query, *key, *query_documents, *key_documents;
};

// The same of one row of the batch, with the spans of its tiles; documents may be null.
struct Row {
  Places at;
  std::vector<Span> queries, keys, query_documents, key_documents;

  Row(const Places& all, const int64_t* line, const Shape& z, int64_t b)
      : at{all.query ? all.query + b * z.t : line + z.s - z.t, all.key ? all.key + b * z.s : line,
           all.query_documents ? all.query_documents + b * z.t
                               : all.key_documents ? all.key_documents + (b + 1) * z.s - z.t : nullptr,
           all.key_documents ? all.key_documents + b * z.s : nullptr},
        queries(spans_of(at.query, z.t, QUERIES)),
        keys(spans_of(at.key, z.s, KEYS)),
        query_documents(spans_of(at.query_documents, z.t, QUERIES)),
        key_documents(spans_of(at.key_documents, z.s, KEYS)) {}
};

// attention_pattern.py's `mix`.
uint32_t mix(uint32_t x) {
  for (int i = 0; i < 2; i++) x = (x >> 16 ^ x) * 0x45d9f3bu;
  return x >> 16 ^ x;
}

// The keys that queries see, as attention_pattern.py defines it.
struct Sees {
  int64_t kind, size, keep, near, random, t;
  std::vector<uint32_t> salts;  // of each random block, what its hash has of the seed
  std::vector<int64_t> line;  // positions of rows that are given none
  std::vector<uint8_t> at;    // at[KEYS + d]: whether a key at distance d may be seen, by its distance alone

  Sees(const Shape& z, const Places& places) : kind(z.kind), size(z.size), keep(z.keep), near(z.near), random(z.random), t(z.t) {
    for (int64_t i = 0; i < random; i++) salts.push_back(mix(uint32_t(z.seed) + uint32_t(i + 1) * 0x9e3779b9u));
    for (int64_t i = 0; i < z.s; i++) line.push_back(i);
    int64_t farthest = z.s;
    if (places.query)
      for (int64_t i = 0; i < z.b * z.t; i++) farthest = std::max(farthest, places.query[i] + 1);
    at.assign(farthest + KEYS + QUERIES, 0);
    for (int64_t d = 0; d < farthest; d++)
      at[KEYS + d] = kind == WINDOW ? d < size : kind == STRIDED ? d < size || d % size == 0 : 1;
  }

  // attention_pattern.py's `random_block`.
  int64_t random_block(int64_t block, int64_t i) const {
    return keep + mix(uint32_t(block) ^ salts[i]) % std::max<int64_t>(1, block - (near - 1 + keep));
  }

  // Whether in a bigbird pattern a query of the tile from q0, of the span q, may see a key of the span s.
  bool meets(const Row& row, int64_t q0, Span q, Span s) const {
    const int64_t first = s.low / size, last = s.high / size, n = std::min(QUERIES, t - q0);
    if (first < keep || q.low / size - last < near) return true;
    for (int64_t x = 0, before = -1; x < n; x++) {
      const int64_t own = row.at.query[q0 + x] / size;
      for (int64_t i = 0; own != before && i < random; i++) {
        const int64_t block = random_block(own, i);
        if (first <= block && block <= last) return true;
      }
      before = own;
    }
    return false;
  }

  // How many keys of a tile [s0, s0 + m) there are up to the last that is not after all queries of the tile from q0.
  int64_t reach(const Row& row, int64_t q0, int64_t s0, int64_t m) const {
    const int64_t last = row.queries[q0 / QUERIES].high;
    if (row.keys[s0 / KEYS].low > last) return 0;
    while (row.at.key[s0 + m - 1] > last) m--;
    return m;
  }

  // Whether the tile of queries from q0 sees the first m keys of that from s0: NONE and ALL are certain, SOME needs a
  // mask. whole: there are no more in the tile.
  Look look(const Row& row, int64_t q0, int64_t s0, int64_t m, bool whole) const {
    const Span q = row.queries[q0 / QUERIES], s = whole ? row.keys[s0 / KEYS] : span_of(row.at.key + s0, m);
    const int64_t nearest = q.low - s.high, farthest = q.high - s.low;
    if (farthest < 0 || (kind == WINDOW && nearest >= size) || (kind == LOCAL && q.low / size > s.high / size) ||
        (kind == BIGBIRD && !meets(row, q0, q, s)))
      return NONE;
    bool all = nearest >= 0;
    if (kind == WINDOW || kind == STRIDED) all = all && farthest < size;
    if (kind == LOCAL || kind == FIXED) all = all && s.low / size == q.high / size;
    if (kind == BIGBIRD) all = all && (q.high / size - s.low / size < near || s.high / size < keep);
    if (row.at.query_documents) {
      const Span mine = row.query_documents[q0 / QUERIES];
      const Span theirs = whole ? row.key_documents[s0 / KEYS] : span_of(row.at.key_documents + s0, m);
      if (mine.high < theirs.low || theirs.high < mine.low) return NONE;
      all = all && mine.low == mine.high && theirs.low == theirs.high;
    }
    return all ? ALL : SOME;
  }

  // Set the scores s of n queries from q0 and m keys from s0 to `low` for pairs that are not seen.
  template <typename W>
  void hide(const Row& row, int64_t q0, int64_t n, int64_t s0, int64_t m, W low, W* s) const {
    const int64_t *query = row.at.query + q0, last = row.queries[q0 / QUERIES].high;
    const bool blocks = kind == LOCAL || kind == FIXED;
    bool straight = true;  // the queries are one after the other
    int64_t block[QUERIES], of = -1;
    uint8_t gathered[QUERIES], in_block[QUERIES];  // in_block: of a bigbird pattern, which queries see the block `of`
    std::vector<int64_t> chosen(random * QUERIES);
    for (int64_t x = 0; x < n; x++) {
      straight = straight && query[x] == query[0] + x;
      if (blocks || kind == BIGBIRD) block[x] = query[x] / size;
      for (int64_t i = 0; i < random; i++)
        chosen[i * QUERIES + x] = x && block[x] == block[x - 1] ? chosen[i * QUERIES + x - 1] : random_block(block[x], i);
    }
    for (int64_t j = s0; j < s0 + m; j++, s += QUERIES) {
      const int64_t key = row.at.key[j];
      if (key > last) {
        std::fill(s, s + n, low);
        continue;
      }
      const uint8_t* there = straight ? &at[KEYS + query[0] - key] : gathered;
      if (!straight)
        for (int64_t x = 0; x < n; x++) gathered[x] = query[x] >= key && at[KEYS + query[x] - key];
#pragma omp simd
      for (int64_t x = 0; x < n; x++) s[x] = there[x] ? s[x] : low;
      if (blocks && !(kind == FIXED && key % size >= size - keep)) {
        const int64_t own = key / size;
#pragma omp simd
        for (int64_t x = 0; x < n; x++) s[x] = block[x] == own ? s[x] : low;
      }
      if (kind == BIGBIRD) {
        if (key / size != of) {
          of = key / size;
          for (int64_t x = 0; x < n; x++) in_block[x] = of < keep || block[x] - of < near;
          for (int64_t i = 0; i < random; i++)
            for (int64_t x = 0; x < n; x++) in_block[x] |= chosen[i * QUERIES + x] == of;
        }
#pragma omp simd
        for (int64_t x = 0; x < n; x++) s[x] = in_block[x] ? s[x] : low;
      }
      if (row.at.query_documents) {
        const int64_t *mine = row.at.query_documents + q0, theirs = row.at.key_documents[j];
#pragma omp simd
        for (int64_t x = 0; x < n; x++) s[x] = mine[x] == theirs ? s[x] : low;
      }
    }
  }
};

// Pad a tile of m keys and n queries with `value` to even numbers of rows and columns (bfloat16 only).
template <typename T>
void pad(int64_t m, int64_t n, Wide<T> value, Wide<T>* s) {
  if (m < padded<T>(m)) std::fill(s + m * QUERIES, s + (m + 1) * QUERIES, value);
  if (n < padded<T>(n))
    for (int64_t j = 0; j < padded<T>(m); j++) s[j * QUERIES + n] = value;
}

// p = 2^((s - top) to_2) for m keys, laid out as a right operand; add its columns to `sum`. to_2 = scale log2(e).
template <typename T>
void weigh(int64_t m, Wide<T> to_2, const Wide<T>* s, const Wide<T>* top, Wide<T>* sum, T* p) {
  for (int64_t j = 0; j < m; j += ROWS<T>, s += ROWS<T> * QUERIES, p += ROWS<T> * QUERIES) {
    if constexpr (ROWS<T> == 1) {
#pragma omp simd
      for (int64_t x = 0; x < QUERIES; x++) p[x] = power_of_2((s[x] - top[x]) * to_2), sum[x] += p[x];
    } else {
      uint32_t* both = reinterpret_cast<uint32_t*>(p);
#pragma omp simd
      for (int64_t x = 0; x < QUERIES; x++) {
        const float a = power_of_2((s[x] - top[x]) * to_2), b = power_of_2((s[QUERIES + x] - top[x]) * to_2);
        sum[x] += a + b;
        both[x] = upper(a) | (upper(b) << 16);
      }
    }
  }
}

// p = 2^(s to_2 - lse) and ds = p (dp - delta) for m keys as left operands; for bfloat16 also ds as a right operand,
// `laid`.
template <typename T>
void differentiate(int64_t m, Wide<T> to_2, const Wide<T>* s, const Wide<T>* dp, const Wide<T>* lse,
                   const Wide<T>* delta, T* p, T* ds, T* laid) {
  for (int64_t j = 0; j < m; j += ROWS<T>) {
    const Wide<T>*s0 = s + j * QUERIES, *s1 = s0 + QUERIES, *dp0 = dp + j * QUERIES, *dp1 = dp0 + QUERIES;
    if constexpr (ROWS<T> == 1) {
      T *to_p = p + j * QUERIES, *to_ds = ds + j * QUERIES;
#pragma omp simd
      for (int64_t x = 0; x < QUERIES; x++) to_p[x] = power_of_2(s0[x] * to_2 - lse[x]),
                                              to_ds[x] = to_p[x] * (dp0[x] - delta[x]);
    } else {
      uint16_t *p0 = &p[j * QUERIES].x, *p1 = p0 + QUERIES, *ds0 = &ds[j * QUERIES].x, *ds1 = ds0 + QUERIES;
      uint32_t* both = reinterpret_cast<uint32_t*>(laid + j * QUERIES);
#pragma omp simd
      for (int64_t x = 0; x < QUERIES; x++) {
        const float a = power_of_2(s0[x] * to_2 - lse[x]), b = power_of_2(s1[x] * to_2 - lse[x]);
        const uint32_t da = upper(a * (dp0[x] - delta[x])), db = upper(b * (dp1[x] - delta[x]));
        p0[x] = uint16_t(upper(a)), p1[x] = uint16_t(upper(b)), ds0[x] = uint16_t(da), ds1[x] = uint16_t(db);
        both[x] = da | (db << 16);
      }
    }
  }
}

// Cap the scores of m keys: s = cap tanh(scale s / cap). With dp the gradient goes through the cap: dp - delta is
// multiplied by the slope there, before pairs that are not seen are hidden.
template <typename W>
void cap_scores(int64_t m, const Shape& z, W* s, W* dp = nullptr, const W* delta = nullptr) {
  const W cap = W(z.cap), inner = W(z.scale / z.cap);
  for (int64_t j = 0; j < m; j++, s += QUERIES) {
    if (!dp) {
#pragma omp simd
      for (int64_t x = 0; x < QUERIES; x++) s[x] = cap * bend(s[x] * inner);
    } else {
#pragma omp simd
      for (int64_t x = 0; x < QUERIES; x++) {
        const W bent = bend(s[x] * inner);
        s[x] = cap * bent;
        dp[x] = delta[x] + (dp[x] - delta[x]) * (1 - bent * bent);
      }
      dp += QUERIES;
    }
  }
}

// The keys and values of a group as a thread lays them out for products: all of at most BLOCK, once; of more a tile of KEYS
// at a time, for each block of queries.
template <typename T>
struct Laid {
  const Shape& z;
  const bool whole;
  const int64_t ld;
  std::vector<T> keys, values, turned;  // turned: of the values in a forward pass, of the keys in a backward pass

  Laid(const Shape& z, bool backward)
      : z(z), whole(z.s <= BLOCK), ld(z.g * z.k), keys(rows() * z.k), values(backward ? rows() * z.k : 0),
        turned(rows() * z.k) {}
  int64_t rows() const { return whole ? z.padded_s() : KEYS; }
  int64_t at(int64_t s0) const { return whole ? s0 * z.k : 0; }  // where the tile of keys from s0 lies

  void tile(const T* k, const T* v, int64_t s0) {
    const int64_t m = std::min(KEYS, z.s - s0), to = at(s0);
    for (int64_t i = 0; i < m; i++) std::copy_n(k + (s0 + i) * ld, z.k, &keys[to + i * z.k]);
    for (int64_t i = 0; i < m && !values.empty(); i++) std::copy_n(v + (s0 + i) * ld, z.k, &values[to + i * z.k]);
    transpose((values.empty() ? v : k) + s0 * ld, ld, m, z.k, &turned[to]);
  }
  void all(const T* k, const T* v) {
    for (int64_t s0 = 0; whole && s0 < z.s; s0 += KEYS) tile(k, v, s0);
  }
};

// Call f(q0, width, s0, m, some) for each tile of queries [q0, q0 + width) of [b0, end) and tile of keys [s0, s0 + m) with
// a visible pair, the keys laid out; some: there are pairs to hide.
template <typename T, typename F>
void each_tile(const Sees& sees, const Row& row, Laid<T>& laid, const T* k, const T* v, int64_t b0, int64_t end, F f) {
  for (int64_t s0 = 0; s0 < laid.z.s; s0 += KEYS) {
    const int64_t there = std::min(KEYS, laid.z.s - s0);
    bool ready = laid.whole;
    for (int64_t q0 = b0; q0 < end; q0 += QUERIES) {
      const int64_t m = sees.reach(row, q0, s0, there);
      const Look look = m ? sees.look(row, q0, s0, m, m == there) : NONE;
      if (look == NONE) continue;
      if (!ready) laid.tile(k, v, s0);
      ready = true;
      f(q0, std::min(QUERIES, end - q0), s0, m, look == SOME);
    }
  }
}

template <typename T>
void forward(const T* q, const T* k, const T* v, const Places& places, void* out, Wide<T>* lse, const Shape& z) {
  using W = Wide<T>;
  const Sees sees(z, places);
  const double rest = z.cap ? 1.0 : z.scale;  // the factor of the scores after the cap, which takes the scale in
  const W to_2 = W(rest * 1.4426950408889634), low = W(-1e30);
  const int64_t ldq = z.h * z.k, ldk = z.g * z.k, heads = z.h / z.g, block = std::min(BLOCK, z.padded_t());
#pragma omp parallel num_threads(z.threads)
  {
    Laid<T> laid(z, false);
    std::vector<T> query(block * z.k), p(KEYS * QUERIES);
    std::vector<W> s(KEYS * QUERIES), acc(block * z.k), tops(block), last(QUERIES), sums(block);
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < z.b * z.g; n++) {
      const int64_t b = n / z.g, group = n % z.g, from = b * z.s * ldk + group * z.k;
      const Row row(places, sees.line.data(), z, b);
      laid.all(k + from, v + from);
      for (int64_t head = group * heads; head < (group + 1) * heads; head++)
        for (int64_t b0 = 0; b0 < z.t; b0 += BLOCK) {
          const int64_t at = b * z.t * ldq + head * z.k, end = std::min(b0 + BLOCK, z.t);
          for (int64_t q0 = b0; q0 < end; q0 += QUERIES)
            turn(q + at + q0 * ldq, ldq, std::min(QUERIES, end - q0), z.k, &query[(q0 - b0) * z.k]);
          std::fill(tops.begin(), tops.end(), low), std::fill(sums.begin(), sums.end(), W(0));
          std::fill(acc.begin(), acc.end(), W(0));
          const auto tile = [&](int64_t q0, int64_t width, int64_t s0, int64_t m, bool some) {
            const int64_t to = laid.at(s0);
            W *top = &tops[q0 - b0], *sum = &sums[q0 - b0], *total = &acc[(q0 - b0) * z.k];
            product(m, width, z.k, &laid.keys[to], z.k, &query[(q0 - b0) * z.k], QUERIES, s.data(), QUERIES, false);
            if (z.cap) cap_scores(m, z, s.data());
            if (some) sees.hide(row, q0, width, s0, m, low, s.data());
            pad<T>(m, width, low, s.data());
            std::copy_n(top, QUERIES, last.data());
            for (int64_t j = 0; j < m; j++)
#pragma omp simd
              for (int64_t x = 0; x < QUERIES; x++) top[x] = top[x] < s[j * QUERIES + x] ? s[j * QUERIES + x] : top[x];
            for (int64_t x = 0; x < QUERIES; x++) last[x] = power_of_2((last[x] - top[x]) * to_2), sum[x] *= last[x];
            for (int64_t c = 0; c < z.k; c++)
#pragma omp simd
              for (int64_t x = 0; x < QUERIES; x++) total[c * QUERIES + x] *= last[x];
            weigh(m, to_2, s.data(), top, sum, p.data());
            product(z.k, width, padded<T>(m), &laid.turned[to], KEYS, p.data(), QUERIES, total, QUERIES, true);
          };
          each_tile(sees, row, laid, k + from, v + from, b0, end, tile);
          for (int64_t i = b0; i < end; i++) {
            const W top = tops[i - b0], sum = sums[i - b0];
            const W* x = &acc[(i - b0) / QUERIES * QUERIES * z.k + i % QUERIES];
            // A query that sees no key has the sum of scores that are hidden; one that is NaN hides nothing.
            const bool none = top == low && !std::isnan(sum);
            for (int64_t c = 0; c < z.k; c++) store<T>(none ? W(0) : x[c * QUERIES] / sum, out, at + i * ldq + c, z.wide);
            lse[(b * z.h + head) * z.t + i] =
                none ? -std::numeric_limits<W>::infinity() : W(top * rest + std::log(sum));
          }
        }
    }
    if (quick<T>()) blas::brgemm_release();
  }
}

// room: 2 S K numbers for each thread, where dk and dv are narrower than the sums, which else are made in their place.
template <typename T>
void backward(const T* q, const T* k, const T* v, const Places& places, const T* out, const Wide<T>* lse, const T* g,
              void* dq, void* dk, void* dv, Wide<T>* room, const Shape& z) {
  using W = Wide<T>;
  const Sees sees(z, places);
  const W log2_e = W(1.4426950408889634), to_2 = z.cap ? log2_e : W(z.scale) * log2_e, low = W(-1e30);
  const int64_t ldq = z.h * z.k, ldk = z.g * z.k, heads = z.h / z.g, block = std::min(BLOCK, z.padded_t());
  const bool in_place = z.wide || std::is_same_v<T, W>;
#pragma omp parallel num_threads(z.threads)
  {
    Laid<T> laid(z, true);
    std::vector<T> turned_q(block * z.k), turned_g(block * z.k), laid_q(block * z.k), laid_g(block * z.k);
    std::vector<T> p(KEYS * QUERIES), ds(KEYS * QUERIES), laid_ds(ROWS<T> == 1 ? 0 : KEYS * QUERIES);
    std::vector<W> s(KEYS * QUERIES), dp(KEYS * QUERIES), acc_q(block * z.k), lse_2(block), delta(block);
    T* right = ROWS<T> == 1 ? ds.data() : laid_ds.data();
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < z.b * z.g; n++) {
      const int64_t b = n / z.g, group = n % z.g, from = b * z.s * ldk + group * z.k;
      const Row row(places, sees.line.data(), z, b);
      W* own = in_place ? nullptr : room + omp_get_thread_num() * 2 * z.s * z.k;
      W *acc_k = in_place ? static_cast<W*>(dk) + from : own, *acc_v = in_place ? static_cast<W*>(dv) + from : own + z.s * z.k;
      const int64_t ldc = in_place ? ldk : z.k;
      laid.all(k + from, v + from);
      for (int64_t i = 0; i < z.s; i++) std::fill_n(acc_k + i * ldc, z.k, W(0)), std::fill_n(acc_v + i * ldc, z.k, W(0));
      for (int64_t head = group * heads; head < (group + 1) * heads; head++)
        for (int64_t b0 = 0; b0 < z.t; b0 += BLOCK) {
          const int64_t at = b * z.t * ldq + head * z.k, end = std::min(b0 + BLOCK, z.t);
          for (int64_t i = b0; i < end; i++) {
            const W x = lse[(b * z.h + head) * z.t + i];
            lse_2[i - b0] = std::isinf(x) ? W(0) : x * log2_e;  // that of a query that sees nothing meets hidden scores alone
          }
          for (int64_t q0 = b0; q0 < end; q0 += QUERIES) {
            const int64_t width = std::min(QUERIES, end - q0), there = at + q0 * ldq, here = (q0 - b0) * z.k;
            turn(q + there, ldq, width, z.k, &turned_q[here]), turn(g + there, ldq, width, z.k, &turned_g[here]);
            lay(q + there, ldq, width, z.k, &laid_q[here]), lay(g + there, ldq, width, z.k, &laid_g[here]);
            sum_rows(width, z.k, out + there, ldq, &turned_g[here], s.data(), &delta[q0 - b0]);
          }
          std::fill(acc_q.begin(), acc_q.end(), W(0));
          const auto tile = [&](int64_t q0, int64_t width, int64_t s0, int64_t m, bool some) {
            const int64_t to = laid.at(s0);
            const int64_t x = q0 - b0, here = x * z.k;
            product(m, width, z.k, &laid.keys[to], z.k, &turned_q[here], QUERIES, s.data(), QUERIES, false);
            product(m, width, z.k, &laid.values[to], z.k, &turned_g[here], QUERIES, dp.data(), QUERIES, false);
            if (z.cap) cap_scores(m, z, s.data(), dp.data(), &delta[x]);
            if (some) sees.hide(row, q0, width, s0, m, low, s.data());
            pad<T>(m, width, low, s.data()), pad<T>(m, width, W(0), dp.data());
            differentiate(m, to_2, s.data(), dp.data(), &lse_2[x], &delta[x], p.data(), ds.data(), laid_ds.data());
            product(m, z.k, padded<T>(width), p.data(), QUERIES, &laid_g[here], z.k, acc_v + s0 * ldc, ldc, true);
            product(m, z.k, padded<T>(width), ds.data(), QUERIES, &laid_q[here], z.k, acc_k + s0 * ldc, ldc, true);
            product(z.k, width, padded<T>(m), &laid.turned[to], KEYS, right, QUERIES, &acc_q[here], QUERIES, true);
          };
          each_tile(sees, row, laid, k + from, v + from, b0, end, tile);
          for (int64_t i = b0; i < end; i++) {
            const W* x = &acc_q[(i - b0) / QUERIES * QUERIES * z.k + i % QUERIES];
            for (int64_t c = 0; c < z.k; c++) store<T>(x[c * QUERIES] * W(z.scale), dq, at + i * ldq + c, z.wide);
          }
        }
      for (int64_t i = 0; i < z.s; i++)
        for (int64_t c = 0; c < z.k; c++) {
          store<T>(acc_k[i * ldc + c] * W(z.scale), dk, from + i * ldk + c, z.wide);
          store<T>(acc_v[i * ldc + c], dv, from + i * ldk + c, z.wide);
        }
    }
    if (quick<T>()) blas::brgemm_release();
  }
}

}  // namespace

#define OF_DTYPE(NAME, T)                                                                                             \
  extern "C" void forward_##NAME(const T* q, const T* k, const T* v, const Places* places, void* out, Wide<T>* lse,   \
                                 const Shape* z) {                                                                    \
    forward(q, k, v, *places, out, lse, *z);                                                                          \
  }                                                                                                                   \
  extern "C" void backward_##NAME(const T* q, const T* k, const T* v, const Places* places, const T* out,             \
                                  const Wide<T>* lse, const T* g, void* dq, void* dk, void* dv, Wide<T>* room,        \
                                  const Shape* z) {                                                                   \
    backward(q, k, v, *places, out, lse, g, dq, dk, dv, room, *z);                                                    \
  }                                                                                                                   \
  extern "C" int works_##NAME() { return works<T>(); }

extern "C" void use_loops(int yes) { loops = yes; }
// A library has one dtype, as each takes seconds to compile.
#if defined(OF_bfloat16)
OF_DTYPE(bfloat16, BFloat16)
#elif defined(OF_float32)
OF_DTYPE(float32, float)
#elif defined(OF_float64)
OF_DTYPE(float64, double)
#endif
