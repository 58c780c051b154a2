// The experts of a mixture in 2 to 8 bits: as grouped_linear.cpp, with the products of quantized_linear.cpp.
#include "expert_runs.h"
#include "quantized_tiles.h"
#include "replay.h"

namespace starling {
namespace {

// The rows of all pairs, each expert's run for itself, in the form in which so many are multiplied. `row_of(pair)` is where x has a
// pair's.
template <typename RowOf>
class RunsOfCodes {
 public:
  RunsOfCodes(const ExpertRuns& runs, const QuantizedWeight& weights, const RowOf& row_of, Scratch& scratch)
      : runs_(runs), weights_(weights), row_of_(row_of), all_(QuantizedRows::in(scratch, runs.pairs(), weights.columns)) {}

  static size_t bytes(const ExpertRuns& runs, const QuantizedWeight& weights) {
    return QuantizedRows::bytes(runs.pairs(), weights.columns);
  }

  void quantize(int threads) const {
    const int worth = threads_for(runs_.pairs(), runs_.pairs() * all_.columns.k * sizeof(bf16), threads);
    in_parallel(worth, [&](Part part) {
      const Span mine = part.of(runs_.pairs());
      for (int64_t e = 0; e < runs_.count; ++e) {
        if (by(e) == By::kBf16Tiles) continue;
        const QuantizedRows rows = of(e);
        const int64_t first = runs_.starts[e], end = std::min(mine.end, first + rows.m);
        for (int64_t pair = std::max(mine.begin, first); pair < end; ++pair)
          rows.quantize(pair - first, row_of_(pair), weights_.begin());
      }
    });
  }

  // The run of an expert by some pairs of its blocks.
  template <typename Finish>
  void multiply(int64_t e, Span pairs, const Finish& finish) const {
    const QuantizedWeight w = weights_.of(e);
#ifdef STARLING_TILES
    if (by(e) == By::kByteTiles) return multiply_bytes(of(e), w, pairs, finish);
    const auto row_of = [&](int64_t i) { return row_of_(runs_.starts[e] + i); };
    if (by(e) == By::kBf16Tiles) return multiply_bf16(runs_.rows(e), row_of, w, pairs, finish);
#endif
    for (int64_t pair = pairs.begin; pair < pairs.end; ++pair) run_pair(of(e), w, w.tiles(), pair, finish);
  }

 private:
  By by(int64_t e) const { return multiplied_by(weights_.columns, runs_.rows(e)); }
  QuantizedRows of(int64_t e) const { return all_.part(runs_.starts[e], runs_.rows(e)); }

  const ExpertRuns& runs_;
  const QuantizedWeight& weights_;
  RowOf row_of_;
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
  const auto row_of = [=](int64_t pair) { return x + tokens[pair] * x_stride; };
  scratch.reset(RunsOfCodes<decltype(row_of)>::bytes(runs, weights));
  const RunsOfCodes rows(runs, weights, row_of, scratch);
  rows.quantize(threads);
  const int64_t width = gated ? n / 2 : n;
  runs.each_span(weights.pairs(), weights.bytes(), threads, [&](int64_t e, Span mine) {
    const Gate gate{alpha, limit, offset};
    const StoreSums<bf16> store_sums{runs.bias_of(biases, e, n), n, gated != 0, out + starts[e] * width, width, gate};
    rows.multiply(e, mine, store_sums);
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
  const auto row_of = [=](int64_t pair) { return x + pair * k; };
  scratch.reset(RunsOfCodes<decltype(row_of)>::bytes(runs, weights) + Scratch::padded<float>(num_tokens * stride));
  const RunsOfCodes rows(runs, weights, row_of, scratch);
  float* totals = scratch.take<float>(num_tokens * stride);
  rows.quantize(threads);
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
      rows.multiply(e, mine, add);
    }
    for (int64_t t = 0; t < num_tokens; ++t)
      for (int64_t j = col; j < std::min(end, n); j += kBlockCols)
        store16(out + t * n + j, load16(totals + t * stride + j), first_lanes(n - j));
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_grouped_quantized_linear)
STARLING_RECORDABLE(starling_grouped_quantized_sum)
