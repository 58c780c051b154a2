// Rows of bf16 with their columns in another order.
#include <algorithm>

#include "parallel.h"
#include "replay.h"

using namespace starling;

// x [m, .] -> out [m, k]: column i is column order[i] of x, or 0 where that is below 0.
extern "C" void starling_gather_columns(const uint16_t* x, int64_t stride, int64_t m, const int32_t* order, int64_t k,
                                        uint16_t* out, int threads) {
  parallel_for(m, threads_for(m, m * k * sizeof *x, threads), [&](int64_t row) {
    const uint16_t* from = x + row * stride;
    uint16_t* to = out + row * k;
    for (int64_t i = 0; i < k; ++i) to[i] = order[i] < 0 ? 0 : from[order[i]];
  });
}

// Pairs of token and expert that are sorted by slot: of slot s those in [starts[s], starts[s + 1]). Pair p is row tokens[p] of x, or
// row p without `tokens`, with its columns in the order of its slot: orders [slots, k], out [pairs, k]. places[p] becomes p.
extern "C" void starling_gather_columns_of_pairs(const uint16_t* x, int64_t stride, const int64_t* tokens, const int64_t* starts,
                                                 int64_t slots, const int32_t* orders, int64_t k, uint16_t* out, int64_t* places,
                                                 int threads) {
  const int64_t pairs = starts[slots];
  parallel_for(pairs, threads_for(pairs, pairs * k * sizeof *x, threads), [&](int64_t pair) {
    const int64_t slot = std::upper_bound(starts, starts + slots, pair) - starts - 1;
    const uint16_t* from = x + (tokens ? tokens[pair] : pair) * stride;
    const int32_t* order = orders + slot * k;
    uint16_t* to = out + pair * k;
    for (int64_t i = 0; i < k; ++i) to[i] = order[i] < 0 ? 0 : from[order[i]];
    places[pair] = pair;
  });
}

STARLING_RECORDABLE(starling_gather_columns)
STARLING_RECORDABLE(starling_gather_columns_of_pairs)
