// Rows of bf16 with their columns in another order.
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

STARLING_RECORDABLE(starling_gather_columns)
