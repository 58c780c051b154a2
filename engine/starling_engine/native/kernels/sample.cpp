// Sampling without a sort. Every filter (top-k, top-p, min-p) keeps the tokens above some logit, so each is a search
// for a threshold; the draw is the largest of logit + Gumbel noise among the kept (the Gumbel-max trick).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNone = -kInfinity;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u, kMix1 = 0xBF58476D1CE4E5B9u, kMix2 = 0x94D049BB133111EBu;

// ---- The largest logit -------------------------------------------------------------------------------------------

// NaN counts as +inf: it is chosen before any other, and the chosen token shows that the row is broken.
Floats nan_to_infinity(Floats v) { return choose(unordered(v), splat16(kInfinity), v); }

// Index of the first value that is +inf or NaN; n without one.
int64_t first_infinite(const float* x, int64_t n) {
  int64_t i = 0;
  while (i < n && x[i] < kInfinity) ++i;
  return i;
}

int64_t first_at_least(const float* x, int64_t n, float t) {
  for (int64_t i = 0; i < n; i += 16)
    if (const Lanes found = at_least(load16(x + i, first_lanes(n - i)), splat16(t)) & first_lanes(n - i))
      return i + __builtin_ctz(found);
  return n;
}

// Index of the largest, the lowest of equals.
int64_t argmax(const float* x, int64_t n) {
  // Comparisons pass over NaN, but a sum keeps it. The sum is NaN also where +inf met -inf, and then +inf is the largest.
  constexpr int kRuns = 4;  // independent maxima and sums, so that their latencies overlap
  Floats top[kRuns], sum[kRuns];
  for (int j = 0; j < kRuns; ++j) top[j] = splat16(kNone), sum[j] = splat16(0.0f);
  int64_t i = 0;
  for (; i + 16 * kRuns <= n; i += 16 * kRuns)
#pragma GCC unroll 4
    for (int j = 0; j < kRuns; ++j) {
      const Floats v = load16(x + i + 16 * j);
      top[j] = highest(v, top[j]);
      sum[j] = sum[j] + v;
    }
  for (; i < n; i += 16) {
    const Lanes lanes = first_lanes(n - i);
    const Floats v = load16(x + i, lanes);
    top[0] = highest(choose(lanes, v, splat16(kNone)), top[0]);
    sum[0] = sum[0] + v;
  }
  if (std::isnan(sum_of(sum[0] + sum[1] + sum[2] + sum[3]))) {
    const int64_t broken = first_infinite(x, n);
    if (broken < n) return broken;
  }
  const float best = highest_of(highest(highest(top[0], top[1]), highest(top[2], top[3])));
  return first_at_least(x, n, best);
}

// The same by several threads.
int64_t argmax(const float* x, int64_t n, int threads) {
  std::vector<int64_t> best(threads, -1);
  in_parallel(threads, [&](Part part) {
    const Span mine = part.of(n);
    if (mine.begin < mine.end) best[part.index] = mine.begin + argmax(x + mine.begin, mine.end - mine.begin);
  });
  int64_t found = -1;
  for (const int64_t next : best) {
    if (next < 0) continue;
    if (found < 0 || (x[found] < kInfinity && !(x[next] <= x[found]))) found = next;
  }
  return found;
}

// Writes x / temperature to `out`, and returns the largest.
float scale(const float* x, int64_t n, float temperature, float* out) {
  Floats top = splat16(kNone);
  const Floats by = splat16(temperature);
  for (int64_t i = 0; i < n; i += 16) {
    const Lanes lanes = first_lanes(n - i);
    const Floats v = nan_to_infinity(load16(x + i, lanes)) / by;
    top = highest(choose(lanes, v, splat16(kNone)), top);
    store16(out + i, v, lanes);
  }
  return highest_of(top);
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
    count += __builtin_popcount(at_least(load16(x + i, first_lanes(n - i)), splat16(t)) & first_lanes(n - i));
  return static_cast<double>(count);
}

// Sums in double of 16 floats at a time.
struct Sums {
#ifdef __AVX512F__
  __m512d low = _mm512_setzero_pd(), high = low;
  void add(Floats v) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(v.part[0])));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(v.part[0], 1)));
  }
  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
#elif defined(__AVX2__)
  __m256d quarters[4] = {};
  void add(Floats v) {
    for (int i = 0; i < 4; ++i) {
      const __m256 half = v.part[i / 2];
      const __m128 quarter = i % 2 == 0 ? _mm256_castps256_ps128(half) : _mm256_extractf128_ps(half, 1);
      quarters[i] = _mm256_add_pd(quarters[i], _mm256_cvtps_pd(quarter));
    }
  }
  double total() const {
    const __m256d all = _mm256_add_pd(_mm256_add_pd(quarters[0], quarters[1]), _mm256_add_pd(quarters[2], quarters[3]));
    return (all[0] + all[1]) + (all[2] + all[3]);
  }
#else
  double lanes[16] = {};
  void add(Floats v) {
    alignas(64) float all[16];
    store16(all, v);
    for (int i = 0; i < 16; ++i) lanes[i] += static_cast<double>(all[i]);
  }
  double total() const { return std::accumulate(lanes, lanes + 16, 0.0); }
#endif
};

// Sum of exp(x - top) over x >= t, in double.
double mass_from(const float* x, int64_t n, float t, float top) {
  Sums sums;
  for (int64_t i = 0; i < n; i += 16) {
    const Floats v = load16(x + i, first_lanes(n - i));
    const Lanes kept = at_least(v, splat16(t)) & first_lanes(n - i);
    if (kept == 0) continue;
    sums.add(choose(kept, exp(v - splat16(top)), splat16(0.0f)));
  }
  return sums.total();
}

// The values >= t (or, with BELOW, < t), packed; returns how many. `out` may be x, and has room for 16 more.
template <bool BELOW = false>
int64_t gather(const float* x, int64_t n, float t, float* out) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const Floats v = load16(x + i, first_lanes(n - i));
    const Lanes kept = (BELOW ? above(splat16(t), v) : at_least(v, splat16(t))) & first_lanes(n - i);
    if (kept != 0) count += pack16(out + count, v, kept);
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
double gumbel(uint64_t random) {
  const double u = (static_cast<double>(random >> 11) + 0.5) * 0x1p-53;
  return -std::log(-std::log(u));
}

// A token's noise has an upper bound: -log(-log u) <= -log(1 - u), and a double's bits, read as an integer, are a piecewise
// linear lower bound of its log2. It is at most 0.06 too high where the noise is large.
#ifdef __AVX512DQ__
__m512i mix(__m512i z) {
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 30)), _mm512_set1_epi64(kMix1));
  z = _mm512_mullo_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 27)), _mm512_set1_epi64(kMix2));
  return _mm512_xor_si512(z, _mm512_srli_epi64(z, 31));
}

__m512d gumbel_bound(__m512i random) {
  const __m512i rest = _mm512_srli_epi64(_mm512_xor_si512(random, _mm512_set1_epi64(-1)), 11);
  const __m512d one_minus_u = _mm512_mul_pd(_mm512_cvtepi64_pd(rest), _mm512_set1_pd(0x1p-53));
  const __m512d log2_low = _mm512_fmadd_pd(_mm512_cvtepi64_pd(_mm512_castpd_si512(one_minus_u)),
                                           _mm512_set1_pd(0x1p-52), _mm512_set1_pd(-1023.0));
  return _mm512_fmadd_pd(log2_low, _mm512_set1_pd(-0.6931471805599453), _mm512_set1_pd(1e-6));
}

// Returns which of the tokens [first, first + 8) have noise that may make them better than `best`.
uint32_t promising(const float* x, int64_t first, uint64_t key, double best) {
  const __m512i lane = _mm512_mullo_epi64(_mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8), _mm512_set1_epi64(kGolden));
  const __m512i random = mix(_mm512_add_epi64(lane, _mm512_set1_epi64(key + kGolden * static_cast<uint64_t>(first))));
  const __m512d bound = _mm512_add_pd(_mm512_cvtps_pd(_mm256_loadu_ps(x + first)), gumbel_bound(random));
  return _mm512_cmp_pd_mask(bound, _mm512_set1_pd(best), _CMP_GE_OQ);
}
#else
uint32_t promising(const float* x, int64_t first, uint64_t key, double best) {
  uint32_t found = 0;
#pragma GCC unroll 8
  for (int lane = 0; lane < 8; ++lane) {
    const uint64_t random = mix(key + kGolden * static_cast<uint64_t>(first + lane + 1));
    const double one_minus_u = static_cast<double>(static_cast<int64_t>(~random >> 11)) * 0x1p-53;
    int64_t bits;
    std::memcpy(&bits, &one_minus_u, sizeof bits);
    const double log2_low = static_cast<double>(bits) * 0x1p-52 - 1023.0;
    const double bound = static_cast<double>(x[first + lane]) + log2_low * -0.6931471805599453 + 1e-6;
    found |= static_cast<uint32_t>(bound >= best) << lane;
  }
  return found;
}
#endif

// A token, -1 for none, and its logit with noise.
struct Drawn {
  int64_t token = -1;
  double value = -std::numeric_limits<double>::infinity();
};

// argmax of x + Gumbel noise over the tokens of `mine` with x >= lowest. Exact noise, two logarithms in double, is computed only
// for tokens whose bound reaches the best so far: about a dozen of a large vocabulary. x has room for 16 more.
Drawn draw(const float* x, Span mine, float lowest, uint64_t key) {
  // Masks and bans leave long runs of -inf, which no noise makes the best.
  lowest = std::max(lowest, std::numeric_limits<float>::lowest());
  Drawn best;
  for (int64_t i = mine.begin; i < mine.end; i += 16) {
    const Lanes lanes = first_lanes(mine.end - i), kept = at_least(load16(x + i, lanes), splat16(lowest)) & lanes;
    for (int half = 0; half < 16; half += 8) {
      uint32_t tried = kept >> half & 0xFF;
      if (tried == 0) continue;
      tried &= promising(x, i + half, key, best.value);
      for (; tried != 0; tried &= tried - 1) {
        const int64_t token = i + half + __builtin_ctz(tried);
        const double value = static_cast<double>(x[token]) + gumbel(mix(key + kGolden * static_cast<uint64_t>(token + 1)));
        if (value > best.value) best = {token, value};
      }
    }
  }
  return best;
}

// The same by several threads.
int64_t draw(const float* x, int64_t n, float lowest, uint64_t key, int threads) {
  std::vector<Drawn> drawn(threads);
  in_parallel(threads, [&](Part part) { drawn[part.index] = draw(x, part.of(n), lowest, key); });
  return std::max_element(drawn.begin(), drawn.end(), [](const Drawn& a, const Drawn& b) { return a.value < b.value; })->token;
}

int64_t sample(const float* row, int64_t vocab, float temperature, const Filter& filter, int64_t seed, int64_t position, int threads) {
  Scratch& scratch = Scratch::mine();
  scratch.reset(2 * Scratch::padded<float>(vocab + 16));
  float* scaled = scratch.take<float>(vocab + 16);
  float* few = scratch.take<float>(vocab + 16);
  const float top = scale(row, vocab, temperature, scaled);
  if (top == kInfinity) return argmax(scaled, vocab);
  const float lowest = threshold(scaled, vocab, top, filter, few);
  const uint64_t key = mix(static_cast<uint64_t>(seed) + kGolden * (static_cast<uint64_t>(position) + 1));
  const int64_t drawn = draw(scaled, vocab, lowest, key, threads);
  return drawn >= 0 ? drawn : argmax(row, vocab);
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// logits [rows, vocab]. The parameters and the seed of row r are the elements `slots[r]` of their arrays, or r where there are no
// slots; the other arrays have one element a row. temperature 0 takes the largest logit. `chosen` gets the tokens' logits, if given.
void starling_sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const int32_t* top_k,
                     const float* top_p, const float* min_p, const int64_t* seed, const int64_t* slots, const int64_t* position,
                     int64_t* token, float* chosen, int threads) {
  // The logits of one row come from memory, which two threads read faster.
  const int for_rows = threads_for(rows, rows * vocab * 4, threads), for_row = rows > 1 ? 1 : threads_for(threads, vocab * 4, threads);
  each_in_turn(rows, for_rows, [&](int64_t r) {
    const int64_t of = slots == nullptr ? r : slots[r];
    const Filter filter{top_k[of], top_p[of], min_p[of]};
    token[r] = temperature[of] == 0.0f ? argmax(logits + r * vocab, vocab, for_row)
                                       : sample(logits + r * vocab, vocab, temperature[of], filter, seed[of], position[r], for_row);
    if (chosen != nullptr) chosen[r] = logits[r * vocab + token[r]];
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_sample)
