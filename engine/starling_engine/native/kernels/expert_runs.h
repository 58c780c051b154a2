// Pairs of a token and an expert, sorted by expert: each expert's pairs are a run of rows, which is multiplied by its matrix.
#pragma once

#include "linear.h"

namespace starling {

// A block of columns costs its reading from memory, or the products of its rows, whichever takes longer. In the time in which a
// line of 64 bytes arrives, a core multiplies it by about this many rows.
constexpr int64_t kRowsPerRead = 32;

struct ExpertRuns {
  const int64_t* tokens;  // [starts[count]], the token of each pair
  const int64_t* starts;  // [count + 1], the pairs of expert e are [starts[e], starts[e + 1])
  int64_t count;

  int64_t pairs() const { return starts[count]; }
  int64_t rows(int64_t e) const { return starts[e + 1] - starts[e]; }
  int64_t active() const {
    int64_t found = 0;
    for (int64_t e = 0; e < count; ++e) found += rows(e) > 0;
    return found;
  }

  // The bias of an expert, where all have one of n numbers.
  static const bf16* bias_of(const bf16* biases, int64_t e, int64_t n) { return biases ? biases + e * n : nullptr; }

  // Calls `each(e, span)` for the experts that have rows, with spans of the `pieces` into which the columns of every expert's
  // matrix of `bytes` are cut. Threads share experts and pieces, so that each takes few experts.
  template <typename Each>
  void each_span(int64_t pieces, int64_t bytes, int threads, const Each& each) const {
    int64_t total = 0;
    for (int64_t e = 0; e < count; ++e) total += cost(e) * pieces;
    in_parallel(threads_for(active() * pieces, active() * bytes, threads), [&](Part part) {
      const Span mine = part.of(total);
      for (int64_t e = 0, at = 0; e < count && at < mine.end; at += cost(e) * pieces, ++e) {
        if (rows(e) == 0) continue;
        const Span span = {piece(mine.begin, at, cost(e), pieces), piece(mine.end, at, cost(e), pieces)};
        if (span.begin < span.end) each(e, span);
      }
    });
  }

 private:
  int64_t cost(int64_t e) const { return rows(e) == 0 ? 0 : std::max(rows(e), kRowsPerRead); }

  // Returns the first piece that begins at `edge` or later, of an expert whose first one begins at `at`.
  static int64_t piece(int64_t edge, int64_t at, int64_t cost, int64_t pieces) {
    return std::min(pieces, ceil_div(std::max<int64_t>(0, edge - at), cost));
  }
};

// Receives the sums of a thread's columns: adds each row, plus its expert's bias, times its pair's weight, to its token's row of
// `totals`.
struct AddWeighted {
  const int64_t* tokens;  // of the pairs
  const float* weights;
  float* totals;  // [tokens][stride], from column `first_col` of the output on
  int64_t stride, first_col;
  int64_t first_row = 0;         // the pair that row 0 of the product is
  const bf16* bias = nullptr;  // of the expert, or null

  const char* line_of(int64_t, int64_t) const { return nullptr; }
  ptrdiff_t line() const { return 0; }

  void operator()(const float* c, ptrdiff_t c_stride, int64_t row, int64_t rows_here, int64_t col, int64_t cols) const {
    for (int64_t i = 0; i < rows_here; ++i) {
      const Floats weight = splat16(weights[first_row + row + i]);
      float* to = totals + tokens[first_row + row + i] * stride + col - first_col;
      // Both rows are whole blocks; columns past the last one are never read.
      for (int64_t j = 0; j < cols; j += kBlockCols)
        store16(to + j, multiply_add(weight, load16(c + i * c_stride + j) + added(col + j, cols - j), load16(to + j)));
    }
  }

 private:
  Floats added(int64_t col, int64_t cols) const { return bias ? load16(bias + col, first_lanes(cols)) : splat16(0.0f); }
};

}  // namespace starling
