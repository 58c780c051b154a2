// The experts of a mixture in 2 to 8 bits: as grouped_linear.cpp, with the products of quantized_linear.cpp.
#include "expert_runs.h"
#include "quantized.h"
#include "replay.h"

namespace starling {
namespace {

// The rows of all pairs in 8 bits, each expert's run for itself: its tiles are as many rows as suit it.
class QuantizedRuns {
 public:
  QuantizedRuns(const ExpertRuns& runs, const QuantizedWeight& weight, Scratch& scratch)
      : runs_(runs), all_(QuantizedRows::in(scratch, runs.pairs(), weight.columns)) {}

  static size_t bytes(const ExpertRuns& runs, const QuantizedWeight& weight) {
    return QuantizedRows::bytes(runs.pairs(), weight.columns);
  }

  QuantizedRows of(int64_t e) const {
    const int64_t at = runs_.starts[e];
    return all_.part(at, runs_.rows(e));
  }

  // Quantizes the row of each pair: `row_of(pair)` is where it is.
  template <typename RowOf>
  void quantize(int32_t begin, int threads, const RowOf& row_of) const {
    const int worth = threads_for(runs_.pairs(), runs_.pairs() * all_.columns.k * sizeof(bf16), threads);
    in_parallel(worth, [&](Part part) {
      const Span mine = part.of(runs_.pairs());
      for (int64_t e = 0; e < runs_.count; ++e) {
        const QuantizedRows rows = of(e);
        const int64_t first = runs_.starts[e], end = std::min(mine.end, first + rows.m);
        for (int64_t pair = std::max(mine.begin, first); pair < end; ++pair) rows.quantize(pair - first, row_of(pair), begin);
      }
    });
  }

 private:
  const ExpertRuns& runs_;
  QuantizedRows all_;
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// As starling_grouped_linear, with the weights of all experts one behind the other, each as starling_pack_quantized packs it.
void starling_grouped_quantized_linear(const bf16* x, int64_t x_stride, const int64_t* tokens, const int64_t* starts,
                                       int64_t count, const uint8_t* codes, const uint16_t* scales, const uint16_t* minima,
                                       const uint8_t* table, int64_t n, int64_t k, int64_t size, int64_t span, int64_t share,
                                       int bits, int zero, const bf16* biases, int gated, float alpha, float limit, float offset,
                                       bf16* out, int threads) {
  const ExpertRuns runs{tokens, starts, count};
  const QuantizedWeight weights{codes, scales, minima, table, n, {k, size, span, share}, bits, zero};
  Scratch& scratch = Scratch::mine();
  scratch.reset(QuantizedRuns::bytes(runs, weights));
  const QuantizedRuns rows(runs, weights, scratch);
  rows.quantize(weights.begin(), threads, [&](int64_t pair) { return x + tokens[pair] * x_stride; });
  const QuantizedTiles& tiles = weights.tiles();
  const int64_t width = gated ? n / 2 : n;
  runs.each_span(weights.pairs(), weights.bytes(), threads, [&](int64_t e, Span mine) {
    const Gate gate{alpha, limit, offset};
    const StoreSums<bf16> store_sums{runs.bias_of(biases, e, n), n, gated != 0, out + starts[e] * width, width, gate};
    for (int64_t pair = mine.begin; pair < mine.end; ++pair) run_pair(rows.of(e), weights.of(e), tiles, pair, store_sums);
  });
}

// As starling_grouped_sum.
void starling_grouped_quantized_sum(const bf16* x, const int64_t* tokens, const float* pair_weights, const int64_t* starts,
                                    int64_t count, const uint8_t* codes, const uint16_t* scales, const uint16_t* minima,
                                    const uint8_t* table, int64_t n, int64_t k, int64_t size, int64_t span, int64_t share,
                                    int bits, int zero, const bf16* biases, bf16* out, int64_t num_tokens,
                                    int threads) {
  const ExpertRuns runs{tokens, starts, count};
  const QuantizedWeight weights{codes, scales, minima, table, n, {k, size, span, share}, bits, zero};
  const int64_t stride = weights.blocks() * kBlockCols;
  Scratch& scratch = Scratch::mine();
  scratch.reset(QuantizedRuns::bytes(runs, weights) + Scratch::padded<float>(num_tokens * stride));
  const QuantizedRuns rows(runs, weights, scratch);
  float* totals = scratch.take<float>(num_tokens * stride);
  rows.quantize(weights.begin(), threads, [&](int64_t pair) { return x + pair * k; });
  const QuantizedTiles& tiles = weights.tiles();
  // A thread has columns of its own, of all experts, so that no two add to the same total.
  in_parallel(threads_for(weights.pairs(), runs.active() * weights.bytes(), threads), [&](Part part) {
    const Span mine = part.of(weights.pairs());
    const int64_t col = mine.begin * 2 * kBlockCols, end = std::min(stride, mine.end * 2 * kBlockCols);
    const size_t width = std::max<int64_t>(0, end - col) * sizeof(float);
    for (int64_t t = 0; t < num_tokens; ++t) std::memset(totals + t * stride + col, 0, width);
    AddWeighted add{tokens, pair_weights, totals, stride, 0};
    for (int64_t e = 0; e < count; ++e) {
      if (runs.rows(e) == 0) continue;
      add.first_row = starts[e];
      add.bias = runs.bias_of(biases, e, n);
      for (int64_t pair = mine.begin; pair < mine.end; ++pair) run_pair(rows.of(e), weights.of(e), tiles, pair, add);
    }
    for (int64_t t = 0; t < num_tokens; ++t)
      for (int64_t j = col; j < std::min(end, n); j += kBlockCols)
        store16(out + t * n + j, load16(totals + t * stride + j), first_lanes(n - j));
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_grouped_quantized_linear)
STARLING_RECORDABLE(starling_grouped_quantized_sum)
