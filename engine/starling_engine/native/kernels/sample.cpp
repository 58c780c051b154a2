// Sampling without a sort. Every filter (top-k, top-p, min-p) keeps the tokens above some logit, so each is a search
// for a threshold; the draw is the largest of logit + Gumbel noise among the kept (the Gumbel-max trick).
#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace starling {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNone = -kInfinity;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kMix1 = 0xBF58476D1CE4E5B9u, kMix2 = 0x94D049BB133111EBu;

// ---- The largest logit -------------------------------------------------------------------------------------------

// NaN counts as +inf: it is chosen before any other, and the chosen token shows that the row is broken.
__m512 nan_to_infinity(__m512 v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_ps(kInfinity));
}

// Index of the first value that is +inf or NaN; n without one.
int64_t first_infinite(const float* x, int64_t n) {
  int64_t i = 0;
  while (i < n && x[i] < kInfinity) ++i;
  return i;
}

// Index of the largest, the lowest of equals.
int64_t argmax(const float* x, int64_t n) {
  constexpr int kLanes = 4;  // independent running maxima, so that the comparisons overlap
  __m512 top[kLanes];
  __m512i at[kLanes];
  for (int j = 0; j < kLanes; ++j) top[j] = _mm512_set1_ps(kNone), at[j] = _mm512_setzero_si512();
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Comparisons pass over NaN, but a sum keeps it. The sum is NaN also where +inf met -inf, and then +inf is the largest.
  __m512 sum[kLanes];
  for (int j = 0; j < kLanes; ++j) sum[j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16 * kLanes)
#pragma GCC unroll 4
    for (int j = 0; j < kLanes; ++j) {
      const int64_t from = i + 16 * j;
      const __mmask16 lanes = first_lanes(std::max<int64_t>(0, n - from));
      const __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(kNone), lanes, x + from);
      const __mmask16 more = _mm512_cmp_ps_mask(v, top[j], _CMP_GT_OQ);
      top[j] = _mm512_mask_mov_ps(top[j], more, v);
      at[j] = _mm512_mask_add_epi32(at[j], more, lane, _mm512_set1_epi32(static_cast<int>(from)));
      sum[j] = _mm512_add_ps(sum[j], v);
    }
  const __m512 total = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
  if (_mm512_cmp_ps_mask(total, total, _CMP_UNORD_Q) != 0) {
    const int64_t broken = first_infinite(x, n);
    if (broken < n) return broken;
  }
  float best = kNone;
  for (int j = 0; j < kLanes; ++j) best = std::max(best, _mm512_reduce_max_ps(top[j]));
  uint32_t index = std::numeric_limits<uint32_t>::max();
  for (int j = 0; j < kLanes; ++j) {
    const __mmask16 here = _mm512_cmp_ps_mask(top[j], _mm512_set1_ps(best), _CMP_EQ_OQ);
    index = std::min(index, _mm512_mask_reduce_min_epu32(here, at[j]));
  }
  return index;
}

// Writes x / temperature to `out`, and returns the largest.
float scale(const float* x, int64_t n, float temperature, float* out) {
  __m512 top = _mm512_set1_ps(kNone);
  const __m512 by = _mm512_set1_ps(temperature);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    const __m512 v = _mm512_div_ps(nan_to_infinity(load16(x + i, lanes)), by);
    top = _mm512_mask_max_ps(top, lanes, top, v);
    store16(out + i, v, lanes);
  }
  return _mm512_reduce_max_ps(top);
}

// ---- Thresholds --------------------------------------------------------------------------------------------------

// Floats as integers of the same order, and back. The mapping is its own inverse.
int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }
int32_t key_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return ordered(bits);
}
float value_of(int32_t key) {
  const int32_t bits = ordered(key);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Number of x that are >= t.
double count_from(const float* x, int64_t n, float t) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16)
    count += __builtin_popcount(
        _mm512_mask_cmp_ps_mask(first_lanes(n - i), load16(x + i, first_lanes(n - i)), _mm512_set1_ps(t), _CMP_GE_OQ));
  return static_cast<double>(count);
}

// Sum of exp(x - top) over x >= t, in double.
double mass_from(const float* x, int64_t n, float t, float top) {
  __m512d low = _mm512_setzero_pd(), high = low;
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = load16(x + i, first_lanes(n - i));
    const __mmask16 kept = _mm512_mask_cmp_ps_mask(first_lanes(n - i), v, _mm512_set1_ps(t), _CMP_GE_OQ);
    if (kept == 0) continue;
    const __m512 w = _mm512_maskz_mov_ps(kept, exp(_mm512_sub_ps(v, _mm512_set1_ps(top))));
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(w)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(w, 1)));
  }
  return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
}

// The values >= t (or, with BELOW, < t), packed; returns how many. `out` may be x, and has room for 16 more.
template <bool BELOW = false>
int64_t gather(const float* x, int64_t n, float t, float* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = load16(x + i, first_lanes(n - i));
    const __mmask16 kept =
        _mm512_mask_cmp_ps_mask(first_lanes(n - i), v, _mm512_set1_ps(t), BELOW ? _CMP_LT_OQ : _CMP_GE_OQ);
    if (kept == 0) continue;
    _mm512_storeu_ps(out + count, _mm512_maskz_compress_ps(kept, v));
    count += __builtin_popcount(kept);
  }
  return count;
}

// Returns the largest t in [low, high] such that the values >= t weigh at least `wanted`; those >= low do. Halves the range
// of floats until one is left, and keeps (in place) only the values in it.
template <typename Weigh>
float search(float* x, int64_t n, float low, float high, double wanted, Weigh weigh) {
  int64_t yes = key_of(low), no = static_cast<int64_t>(key_of(high)) + 1;
  double above_no = 0;
  while (no - yes > 1) {
    const int64_t middle = (yes + no) >> 1;
    const float t = value_of(static_cast<int32_t>(middle));
    const double weight = weigh(x, n, t);
    if (above_no + weight >= wanted) {
      yes = middle;
      n = gather(x, n, t, x);
    } else {
      no = middle;
      above_no += weight;
      n = gather<true>(x, n, t, x);
    }
  }
  return value_of(static_cast<int32_t>(yes));
}

// Searches a whole row, from `floor` up; -inf if all of it does not weigh enough. Tries the few values near the top first,
// which nearly always suffice. `few` has room for n + 16.
template <typename Weigh>
float find(const float* x, int64_t n, float floor, float top, double wanted, float* few, Weigh weigh) {
  floor = std::max(floor, std::numeric_limits<float>::lowest());
  for (const float below : {8.0f, 16.0f, -kNone}) {
    const float low = std::max(top - below, floor);
    const int64_t count = gather(x, n, low, few);
    if (weigh(few, count, low) >= wanted) return search(few, count, low, top, wanted, weigh);
  }
  return kNone;
}

struct Filter {
  int64_t top_k;  // 0: off
  float top_p;    // 1: off
  float min_p;    // 0: off
};

// Returns the lowest logit that all filters keep.
float threshold(const float* x, int64_t n, float top, const Filter& filter, float* few) {
  float lowest = kNone;
  if (filter.top_k > 0 && filter.top_k < n)
    lowest = find(x, n, kNone, top, static_cast<double>(filter.top_k), few, count_from);
  if (filter.top_p < 1.0f) {
    const auto mass = [top](const float* v, int64_t count, float t) { return mass_from(v, count, t, top); };
    const double wanted = static_cast<double>(filter.top_p) * mass_from(x, n, lowest, top);
    lowest = std::max(lowest, find(x, n, lowest, top, wanted, few, mass));
  }
  if (filter.min_p > 0) {
    const double exact = static_cast<double>(top) + std::log(static_cast<double>(filter.min_p));
    float rounded_up = static_cast<float>(exact);
    if (rounded_up < exact) rounded_up = std::nextafter(rounded_up, -kNone);
    lowest = std::max(lowest, rounded_up);
  }
  return lowest;
}

// ---- The draw ----------------------------------------------------------------------------------------------------

// SplitMix64's finaliser.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * kMix1;
  z = (z ^ (z >> 27)) * kMix2;
  return z ^ (z >> 31);
}
__m512i mix(__m512i z) {
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), _mm512_set1_epi64(kMix1));
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), _mm512_set1_epi64(kMix2));
  return _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
}

double gumbel(uint64_t random) {
  const double u = (static_cast<double>(random >> 11) + 0.5) * 0x1p-53;
  return -std::log(-std::log(u));
}

// Upper bound of the Gumbel noise of each lane: -log(-log u) <= -log(1 - u), and a double's bits, read as an integer, are a
// piecewise linear lower bound of its log2. It is at most 0.06 too high where the noise is large.
__m512d gumbel_bound(__m512i random) {
  const __m512i rest = _mm512_srli_epi64(_mm512_xor_si512(random, _mm512_set1_epi64(-1)), 11);
  const __m512d one_minus_u = _mm512_mul_pd(_mm512_cvtepi64_pd(rest), _mm512_set1_pd(0x1p-53));
  const __m512d log2_low = _mm512_fmadd_pd(_mm512_cvtepi64_pd(_mm512_castpd_si512(one_minus_u)),
                                           _mm512_set1_pd(0x1p-52), _mm512_set1_pd(-1023.0));
  return _mm512_fmadd_pd(log2_low, _mm512_set1_pd(-0.6931471805599453), _mm512_set1_pd(1e-6));
}

// argmax of x + Gumbel noise over the tokens with x >= lowest. Exact noise, two logarithms in double, is computed only
// for tokens whose bound reaches the best so far: about a dozen of a large vocabulary.
int64_t draw(const float* x, int64_t n, float lowest, uint64_t key) {
  // Masks and bans leave long runs of -inf, which no noise makes the best.
  lowest = std::max(lowest, std::numeric_limits<float>::lowest());
  double best = -std::numeric_limits<double>::infinity();
  int64_t chosen = -1;
  const __m512i lane = _mm512_mullo_epi64(_mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8), _mm512_set1_epi64(kGolden));
  for (int64_t i = 0; i < n; i += 8) {
    const __mmask8 lanes = static_cast<__mmask8>(first_lanes(std::min<int64_t>(8, n - i)));
    const __m256 v = _mm256_maskz_loadu_ps(lanes, x + i);
    const __mmask8 kept = _mm256_mask_cmp_ps_mask(lanes, v, _mm256_set1_ps(lowest), _CMP_GE_OQ);
    if (kept == 0) continue;
    const __m512i random = mix(_mm512_add_epi64(lane, _mm512_set1_epi64(key + kGolden * static_cast<uint64_t>(i))));
    const __m512d bound = _mm512_add_pd(_mm512_cvtps_pd(v), gumbel_bound(random));
    uint32_t promising = _mm512_mask_cmp_pd_mask(kept, bound, _mm512_set1_pd(best), _CMP_GE_OQ);
    for (; promising != 0; promising &= promising - 1) {
      const int64_t token = i + __builtin_ctz(promising);
      const double value = static_cast<double>(x[token]) + gumbel(mix(key + kGolden * static_cast<uint64_t>(token + 1)));
      if (value > best) best = value, chosen = token;
    }
  }
  return chosen;
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// logits [rows, vocab]; the other arrays have one element a row. temperature 0 takes the largest logit.
void starling_sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int32_t* top_k,
                     const float* top_p, const float* min_p, const int64_t* seed, const int64_t* position,
                     int64_t* token, int threads) {
  each_in_turn(rows, threads_for(rows, rows * vocab * 4, threads), [&](int64_t r) {
    const float* row = logits + r * vocab;
    if (temperature[r] == 0.0f) {
      token[r] = argmax(row, vocab);
      return;
    }
    Scratch& scratch = Scratch::mine();
    scratch.reset(2 * Scratch::padded<float>(vocab + 16));
    float* scaled = scratch.take<float>(vocab + 16);
    float* few = scratch.take<float>(vocab + 16);
    const float top = scale(row, vocab, temperature[r], scaled);
    if (top == kInfinity) {
      token[r] = argmax(scaled, vocab);
      return;
    }
    const float lowest = threshold(scaled, vocab, top, {top_k[r], top_p[r], min_p[r]}, few);
    const uint64_t key = mix(static_cast<uint64_t>(seed[r]) + kGolden * (static_cast<uint64_t>(position[r]) + 1));
    const int64_t drawn = draw(scaled, vocab, lowest, key);
    token[r] = drawn >= 0 ? drawn : argmax(row, vocab);
  });
}

}  // extern "C"
