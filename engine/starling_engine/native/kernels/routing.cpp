// The choice of experts: softmax or sigmoid, groups, the best of them, weights; and pairs of token and expert sorted by slot.
#include <cmath>
#include <limits>

#include "parallel.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

// Replaces NaN and anything lower: worse than any affinity, better than what is excluded. Two do not overflow.
constexpr float kLowest = -1e38f;
constexpr float kExcluded = -std::numeric_limits<float>::infinity();
// Avoids division by zero where all affinities are zero.
constexpr float kTiny = 1e-20f;

struct Routing {
  int64_t experts, top_k, groups, top_groups;
  bool softmax, best_two, renormalize;
  float scaling;

  void affinities(const float* logits, float* out) const {
    const float top = *std::max_element(logits, logits + experts);
    float sum = 0;
    for (int64_t e = 0; e < experts; ++e)
      sum += out[e] = softmax ? std::exp(logits[e] - top) : 1.0f / (1.0f + std::exp(-logits[e]));
    if (softmax)
      for (int64_t e = 0; e < experts; ++e) out[e] /= sum;
  }

  // Excludes experts that are not in the best groups. `worth` is memory for a number of each group.
  void within_groups(float* wanted, float* worth) const {
    const int64_t size = experts / groups;
    for (int64_t g = 0; g < groups; ++g) {
      float best = kExcluded, second = kExcluded;
      for (int64_t i = 0; i < size; ++i) {
        const float each = wanted[g * size + i];
        if (each > best) second = best, best = each;
        else if (each > second) second = each;
      }
      worth[g] = best_two ? best + second : best;
    }
    for (int64_t i = 0; i < groups - top_groups; ++i) {
      const int64_t least = first_least(worth);
      worth[least] = std::numeric_limits<float>::infinity();
      std::fill(wanted + least * size, wanted + (least + 1) * size, kExcluded);
    }
  }

  // The least of the groups. Of equal ones the first is left out, as torch's topk does; which is better, float32 cannot tell.
  int64_t first_least(const float* worth) const {
    int64_t least = 0;
    for (int64_t g = 1; g < groups; ++g)
      if (worth[g] < worth[least]) least = g;
    return least;
  }

  void choose(const float* affinity, float* wanted, float* weights, int64_t* ids) const {
    float sum = 0;
    for (int64_t i = 0; i < top_k; ++i) {
      const int64_t best = std::max_element(wanted, wanted + experts) - wanted;
      wanted[best] = kExcluded;
      ids[i] = best, weights[i] = affinity[best], sum += weights[i];
    }
    for (int64_t i = 0; i < top_k; ++i) {
      if (renormalize) weights[i] /= sum + kTiny;
      weights[i] *= scaling;
    }
  }
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// logits [tokens, experts], bias [experts] or null -> weights and ids [tokens, top_k], a token's best expert first. Its experts are
// distinct even where logits are NaN.
void starling_route(const float* logits, const float* bias, int64_t tokens, int64_t experts, int64_t top_k, int64_t groups,
                    int64_t top_groups, int softmax, int best_two, int renormalize, float scaling, float* weights, int64_t* ids,
                    int threads) {
  const Routing routing{experts, top_k, groups, top_groups, softmax != 0, best_two != 0, renormalize != 0, scaling};
  // A choice among 128 experts takes as long as reading some kilobytes.
  in_parallel(threads_for(tokens, tokens * experts * 64, threads), [&](Part part) {
    const Span mine = part.of(tokens);
    Scratch& scratch = Scratch::mine();
    scratch.reset(2 * Scratch::padded<float>(experts) + Scratch::padded<float>(groups));
    float* affinity = scratch.take<float>(experts);
    float* wanted = scratch.take<float>(experts);
    float* worth = scratch.take<float>(groups);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      routing.affinities(logits + t * experts, affinity);
      for (int64_t e = 0; e < experts; ++e) {
        const float each = affinity[e] + (bias ? bias[e] : 0.0f);
        wanted[e] = each > kLowest ? each : kLowest;
      }
      if (top_groups < groups) routing.within_groups(wanted, worth);
      routing.choose(affinity, wanted, weights + t * top_k, ids + t * top_k);
    }
  });
}

// table [size] at ids [n], of which -1 is the last -> out [n].
void starling_look_up(const int64_t* table, int64_t size, const int64_t* ids, int64_t n, int64_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = table[ids[i] < 0 ? ids[i] + size : ids[i]];
}

// Sorts pairs by slot: slots and weights [tokens * top_k] -> starts [num_slots + 1], and the tokens and weights of the pairs in that
// order. Pairs with a slot of num_slots are left out. Stable.
void starling_group_by_slot(const int64_t* slots, const float* weights, int64_t tokens, int64_t top_k, int64_t num_slots,
                            int64_t* starts, int64_t* sorted_tokens, float* sorted_weights) {
  const int64_t pairs = tokens * top_k;
  std::fill(starts, starts + num_slots + 1, 0);
  for (int64_t i = 0; i < pairs; ++i)
    if (slots[i] < num_slots) ++starts[slots[i] + 1];
  for (int64_t s = 0; s < num_slots; ++s) starts[s + 1] += starts[s];
  // Each start moves to its slot's end, which is the next one's start, and all are moved back by one.
  for (int64_t i = 0; i < pairs; ++i) {
    if (slots[i] == num_slots) continue;
    const int64_t at = starts[slots[i]]++;
    sorted_tokens[at] = i / top_k, sorted_weights[at] = weights[i];
  }
  for (int64_t s = num_slots; s > 0; --s) starts[s] = starts[s - 1];
  starts[0] = 0;
}

}  // extern "C"

STARLING_RECORDABLE(starling_route)
STARLING_RECORDABLE(starling_look_up)
STARLING_RECORDABLE(starling_group_by_slot)
