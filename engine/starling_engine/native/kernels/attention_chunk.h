// A chunk of keys and values of one KV head, in the cache's layout: dot products with the keys, and weighted sums of the
// values, each for two query heads at a time. The next chunk is prefetched meanwhile.
//
// The unit is an octet: 8 keys whose rows follow one another, as block sizes are multiples of 8.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"

namespace starling {

constexpr int64_t kMaxChunk = 64;
constexpr int64_t kOctets = kMaxChunk / 8;

// Keys whose scores are computed before their values are read, a multiple of 16. Memory is prefetched as far ahead:
// 8 KB of keys measured best, and twice that where more heads use them.
template <typename T, typename C>
int64_t chunk_keys(const Attention<T, C>& a) {
  const int64_t bytes = a.group() <= 2 ? 8192 : 16384;
  return std::clamp<int64_t>(bytes / (a.dim * sizeof(T)) / 16 * 16, 16, kMaxChunk);
}

// Queries of T and keys of K, a register of words of 32 bits at a time: numbers of fp32, or pairs of bf16.
template <typename T, typename K>
struct Words {
  static Reg load(const K* p, int64_t) { return starling::load(p); }
  static Reg add(Reg sum, Reg q, Reg k) { return multiply_add(q, k, sum); }
};
#ifdef STARLING_BF16_PAIRS
template <>
struct Words<bf16, bf16> {
  static IReg load(const bf16* p, int64_t words) { return load_words(p, words); }
  static Reg add(Reg sum, IReg q, IReg k) { return multiply_pairs(sum, q, k); }
};
#endif

// Dot products of two heads with an octet (HEADS 2), or of one head with two octets (HEADS 1), as many at a time as there are
// registers for; scores of a head are kMaxChunk apart. `rows_ahead` rows of `ahead` are prefetched along the way: in order, which
// the hardware supports, and a few lines at a time, since a burst of requests overflows the core's queue, and the rest is dropped.
template <typename T, typename K, int HEADS>
inline void dots(const T* q, const K* const* octets, int64_t dim, const K* ahead, int64_t rows_ahead, float* scores) {
  constexpr int KEYS = kSums / HEADS;
  constexpr int64_t kElements = kLanes * 4 / sizeof(T);
#pragma GCC unroll 2
  for (int first = 0; first < 16 / HEADS; first += KEYS) {
    Reg partial[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) partial[i] = splat(0.0f);
    for (int64_t d = 0; d < dim; d += kElements) {
      const int64_t words = (dim - d) * sizeof(T) / 4;
      if (first == 0 && d % kLine<K> == 0)
        for (int64_t i = 0; i < rows_ahead; ++i, ahead += kLine<K>) fetch(ahead);
      decltype(Words<T, T>::load(q, 0)) query[HEADS];
#pragma GCC unroll 2
      for (int h = 0; h < HEADS; ++h) query[h] = Words<T, T>::load(q + h * dim + d, words);
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; ++i) {
        const auto key = Words<T, K>::load(octets[(first + i) / 8] + (first + i) % 8 * dim + d, words);
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; ++h) partial[h * KEYS + i] = Words<T, K>::add(partial[h * KEYS + i], query[h], key);
      }
    }
    alignas(64) float sums[kSums];
    sums_of(partial, sums);
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; ++h) std::memcpy(scores + h * kMaxChunk + first, sums + h * KEYS, KEYS * sizeof(float));
  }
}

// A run of keys of one sequence and head.
template <typename T>
struct Chunk {
  const T* octets[kOctets + 1];  // one more, so that octets can be read in pairs
  int64_t count = 0;  // at most chunk_keys

  // The keys of the task's first head, from `begin`, a multiple of 8, to the task's last, or as many as fit.
  template <typename Q>
  Chunk(const Attention<Q, T>& a, const Task& task, int64_t begin)
      : count(std::clamp<int64_t>(task.key_end - begin, 0, chunk_keys(a))) {
    int64_t i = 0;
    for (; i * 8 < count; ++i) octets[i] = key_row(a, task, begin + i * 8);
    octets[i] = i > 0 ? octets[i - 1] : nullptr;
  }
  Chunk() = default;

  // The same keys of another head, `elements` further.
  Chunk moved(int64_t elements) const {
    Chunk other = *this;
    for (const T*& octet : other.octets) octet += elements;
    return other;
  }

  int64_t octet_count() const { return (count + 7) / 8; }
};

// Converts chunks of a cache of another type to T, one after the other.
template <typename T>
struct Unpacked {
  T* rows;  // [2][kMaxChunk][dim]: keys, then values
  int64_t dim;

  static int64_t elements(int64_t dim) { return 2 * values_after(dim); }
  static int64_t values_after(int64_t dim) { return kMaxChunk * dim; }

  // Prefetches the rows of `next` for which `chunk` has one. The result is valid until the next call.
  template <typename C>
  Chunk<T> take(const Chunk<C>& chunk, const Chunk<C>& next, int64_t values_at) const {
    Chunk<T> out;
    out.count = chunk.count;
    T* to = rows;
    int64_t o = 0;
    for (; o < chunk.octet_count(); ++o, to += 8 * dim) {
      for (int64_t d = 0; o < next.octet_count() && d < 8 * row_size<C>(dim); d += kLine<C>) {
        fetch(next.octets[o] + d);
        fetch(next.octets[o] + values_at + d);
      }
      load_rows(chunk.octets[o], 8, dim, to);
      load_rows(chunk.octets[o] + values_at, 8, dim, to + values_after(dim));
      out.octets[o] = to;
    }
    out.octets[o] = o > 0 ? out.octets[o - 1] : nullptr;
    return out;
  }
};

// scores[head][key] = q[head] . key, for HEADS heads. Prefetches this pass's share of the values meanwhile.
template <typename T, typename K, int HEADS>
void score_chunk(const T* q, const Chunk<K>& chunk, int64_t dim, int64_t values_at, Span share, float* scores) {
  for (int64_t o = 0; o < chunk.octet_count(); o += 2 / HEADS) {
    const K* ahead = chunk.octets[o] + values_at + share.begin * dim;
    dots<T, K, HEADS>(q, chunk.octets + o, dim, ahead, share.end - share.begin, scores + o * 8);
    if (HEADS == 1)
      for (int64_t i = 0; i < 8 && o + 1 < chunk.octet_count(); ++i)
        for (int64_t d = 0; d < dim; d += kLine<K>) fetch(chunk.octets[o + 1] + values_at + i * dim + d);
  }
}

// sums[head][0..16 * BLOCKS) += weights[head][key] * value[key], key by key, for HEADS heads in registers.
template <typename T, typename K, int HEADS, int BLOCKS>
struct ValueSums {
  static constexpr int64_t kKeys = 1;  // taken at a time
  Floats acc[HEADS][BLOCKS];

  ValueSums(const float* sums, int64_t dim) {
    each([&](int h, int j) { acc[h][j] = load16(sums + h * dim + j * 16); });
  }
  void store(float* sums, int64_t dim) const {
    each([&](int h, int j) { store16(sums + h * dim + j * 16, acc[h][j]); });
  }

  void add(const K* value, const K*, const T* weights) {
    Floats v[BLOCKS];
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS; ++j) v[j] = load16(value + j * 16);
    each([&](int h, int j) { acc[h][j] = multiply_add(v[j], splat16(to_float(weights[h * kMaxChunk])), acc[h][j]); });
  }

 private:
  template <typename F>
  static void each(F f) {
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS; ++j) f(h, j);
  }
};

#if defined(STARLING_BF16_PAIRS) && defined(__AVX512F__)
#define STARLING_PAIR_SUMS
// The same for an even number of blocks of bf16: two keys at a time, their elements interleaved for vdpbf16ps.
// Interleaving within 128 bits leaves the sums of 32 columns out of order, until they are stored.
template <int HEADS, int PAIRS>
struct PairSums {
  static constexpr int64_t kKeys = 2;
  __m512 acc[HEADS][PAIRS][2];

  PairSums(const float* sums, int64_t dim) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(4));
    each([&](int h, int j) {
      const __m512 a = _mm512_loadu_ps(sums + h * dim + j * 32), b = _mm512_loadu_ps(sums + h * dim + j * 32 + 16);
      acc[h][j][0] = _mm512_permutex2var_ps(a, low, b);
      acc[h][j][1] = _mm512_permutex2var_ps(a, high, b);
    });
  }
  void store(float* sums, int64_t dim) const {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    each([&](int h, int j) {
      const __m512 a = acc[h][j][0], b = acc[h][j][1];
      _mm512_storeu_ps(sums + h * dim + j * 32, _mm512_permutex2var_ps(a, first, b));
      _mm512_storeu_ps(sums + h * dim + j * 32 + 16, _mm512_permutex2var_ps(a, second, b));
    });
  }

  // `other` is the next key's value, or null.
  void add(const bf16* value, const bf16* other, const bf16* weights) {
    __m512bh low[PAIRS], high[PAIRS];
#pragma GCC unroll 4
    for (int j = 0; j < PAIRS; ++j) {
      const __m512i a = _mm512_loadu_si512(value + j * 32);
      const __m512i b = other ? _mm512_loadu_si512(other + j * 32) : _mm512_setzero_si512();
      low[j] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      high[j] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    each([&](int h, int j) {
      int32_t two;
      std::memcpy(&two, weights + h * kMaxChunk, sizeof two);
      const __m512bh weight = (__m512bh)_mm512_set1_epi32(two);
      acc[h][j][0] = _mm512_dpbf16_ps(acc[h][j][0], weight, low[j]);
      acc[h][j][1] = _mm512_dpbf16_ps(acc[h][j][1], weight, high[j]);
    });
  }

 private:
  template <typename F>
  static void each(F f) {
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 4
      for (int j = 0; j < PAIRS; ++j) f(h, j);
  }
};

#endif

template <typename T, typename K, int HEADS, int BLOCKS>
struct SumsFor {
  using Type = ValueSums<T, K, HEADS, BLOCKS>;
};
#ifdef STARLING_PAIR_SUMS
template <int HEADS, int BLOCKS>
struct SumsFor<bf16, bf16, HEADS, BLOCKS> {
  using Type = std::conditional_t<BLOCKS % 2 == 0, PairSums<HEADS, BLOCKS / 2>, ValueSums<bf16, bf16, HEADS, BLOCKS>>;
};
#endif

// Adds a whole chunk to the sums. Prefetches, of the next chunk, the pairs of keys that are `pass` modulo `passes`.
template <typename T, typename K, int HEADS, int BLOCKS>
void add_values(const Chunk<K>& chunk, int64_t dim, int64_t values_at, const T* weights, float* sums,
                const Chunk<K>& next, int pass, int passes) {
  using Sums = typename SumsFor<T, K, HEADS, BLOCKS>::Type;
  Sums total(sums, dim);
  int until_turn = pass;
  for (int64_t o = 0; o * 8 < chunk.count; ++o) {
    const K* value = chunk.octets[o] + values_at;
    const int64_t keys = std::min<int64_t>(8, chunk.count - o * 8);
    for (int64_t i = 0; i < keys; i += Sums::kKeys, value += Sums::kKeys * dim) {
      if (until_turn-- == 0) {
        until_turn = passes - 1;
        if (o * 8 + i < next.count)
          for (int64_t d = 0; d < Sums::kKeys * dim; d += kLine<K>) fetch(next.octets[o] + i * dim + d);
      }
      total.add(value, i + 1 < keys ? value + dim : nullptr, weights + o * 8 + i);
    }
  }
  total.store(sums, dim);
}

// Blocks of 16 columns, of two heads, for which there are registers.
constexpr int kMostBlocks = kRegisters / 4 / kParts;

// All columns of the sums, as many at a time as there are registers for.
template <typename T, typename K, int HEADS>
void add_all_values(const Chunk<K>& chunk, int64_t dim, int64_t values_at, const T* weights, float* sums,
                    const Chunk<K>& next, int pass, int passes) {
  for (int64_t d = 0; d < dim;) {
    const auto add = [&](auto blocks) {
      static const Chunk<K> none{};
      add_values<T, K, HEADS, blocks>(chunk, dim, values_at + d, weights, sums + d, d == 0 ? next : none, pass, passes);
      d += 16 * blocks;
    };
    if (d + 16 * kMostBlocks <= dim)
      add(std::integral_constant<int, kMostBlocks>());
    else if (d + 8 * kMostBlocks <= dim)
      add(std::integral_constant<int, kMostBlocks / 2>());
    else
      add(std::integral_constant<int, 1>());
  }
}

}  // namespace starling
