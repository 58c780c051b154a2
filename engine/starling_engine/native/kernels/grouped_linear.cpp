// The experts of a mixture. All runs are one parallel region.
#include "expert_runs.h"
#include "fp8_linear.h"
#include "replay.h"

namespace starling {
namespace {

struct Bf16Experts : ExpertRuns {
  const bf16* packed;  // [count][ceil(n / 16)][k / 2][16][2]
  int64_t n, k;

  int64_t blocks() const { return ceil_div(n, kBlockCols); }
  int64_t bytes() const { return blocks() * kBlockCols * k * 2; }
  PackedProduct product(const Bf16Operand* x, int64_t x_stride, int64_t e) const {
    return {x, x_stride, packed + e * blocks() * kBlockCols * k, n, k};
  }
};

struct Fp8Experts : ExpertRuns {
  const fp8_weight* packed;  // [count][ceil(n / 16)][k / 2][16][2]
  const float* scales;       // [count][ceil(n / 16)][groups][16]
  int64_t n, k, groups;

  int64_t blocks() const { return ceil_div(n, kBlockCols); }
  int64_t bytes() const { return blocks() * kBlockCols * k; }
  Fp8Product product(const Bf16Operand* x, int64_t x_stride, int64_t e) const {
    const int64_t columns = e * blocks() * kBlockCols;
    return {x, x_stride, packed + columns * k, scales + columns * groups, n, k, groups};
  }
};

// Gathers every token of a run from x, multiplies it, and stores it at its pair's row.
template <typename Experts>
struct GroupedLinear {
  Experts experts;
  const bf16* x;
  int64_t x_stride;
  const bf16* biases;  // [count][n], or null
  bool gated;
  Gate gate;
  bf16* out;  // [pairs][n], or gated [pairs][n / 2]

  void run(int threads) const {
    experts.each_span(experts.blocks(), experts.bytes(), threads, [&](int64_t e, Span mine) { run_expert(e, mine); });
  }

  void run_expert(int64_t e, Span mine) const {
    const int64_t width = gated ? experts.n / 2 : experts.n;
    for (int64_t row = experts.starts[e]; row < experts.starts[e + 1]; row += kMaxRows) {
      const int64_t m = std::min(kMaxRows, experts.starts[e + 1] - row);
      const StoreSums<bf16> store_sums{experts.bias_of(biases, e, experts.n), experts.n, gated, out + row * width, width, gate};
      experts.product(gathered(row, m), experts.k, e).run_span(mine, 0, m, store_sums);
    }
  }

  // Returns the tokens of pairs [row, row + m), one after another; valid until this thread's next call.
  const Bf16Operand* gathered(int64_t row, int64_t m) const {
    const int64_t k = experts.k;
    if (kPairs && m == 1) return reinterpret_cast<const Bf16Operand*>(x + experts.tokens[row] * x_stride);
    Scratch& scratch = Scratch::mine();
    scratch.reset(Scratch::padded<Bf16Operand>(m * k + 16));
    Bf16Operand* rows = scratch.take<Bf16Operand>(m * k + 16);
    for (int64_t i = 0; i < m; ++i) unpack(x + experts.tokens[row + i] * x_stride, k, rows + i * k);
    return rows;
  }
};

// Sums each token's pairs. A thread has columns of its own, of all experts, so that no two add to the same total. Experts are added
// in their order, whatever else is in the batch.
template <typename Experts>
struct GroupedSum {
  Experts experts;
  const bf16* x;         // [pairs][k]
  const float* weights;  // [pairs]
  const bf16* biases;    // [count][n], or null
  int64_t num_tokens;
  bf16* out;  // [num_tokens][n]

  void run(int threads) const {
    in_parallel(threads_for(experts.blocks(), experts.active() * experts.bytes(), threads), [&](Part part) {
      const Span mine = part.of(experts.blocks());
      const int64_t stride = (mine.end - mine.begin) * kBlockCols;
      Scratch& scratch = Scratch::mine();
      const int64_t room = OperandRows::room(kMaxRows, experts.k);
      scratch.reset(Scratch::padded<float>(num_tokens * stride) + Scratch::padded<Bf16Operand>(room));
      float* totals = scratch.take<float>(num_tokens * stride);
      Bf16Operand* memory = scratch.take<Bf16Operand>(room);
      std::memset(totals, 0, num_tokens * stride * sizeof(float));
      if (stride > 0) add_all(mine, memory, AddWeighted{experts.tokens, weights, totals, stride, mine.begin * kBlockCols});
      store(totals, stride, mine.begin * kBlockCols);
    });
  }

  void add_all(Span mine, Bf16Operand* memory, AddWeighted add) const {
    for (int64_t e = 0; e < experts.count; ++e) {
      add.bias = experts.bias_of(biases, e, experts.n);
      for (int64_t row = experts.starts[e]; row < experts.starts[e + 1]; row += kMaxRows) {
        const int64_t m = std::min(kMaxRows, experts.starts[e + 1] - row), k = experts.k;
        const OperandRows operand = OperandRows::of(x + row * k, k, m, k, memory);
        add.first_row = row;
        experts.product(operand.rows, operand.stride, e).run_span(mine, 0, m, add);
      }
    }
  }

  void store(const float* totals, int64_t stride, int64_t first_col) const {
    const int64_t cols = std::min(stride, experts.n - first_col);
    for (int64_t t = 0; t < num_tokens; ++t)
      for (int64_t j = 0; j < cols; j += kBlockCols)
        store16(out + t * experts.n + first_col + j, load16(totals + t * stride + j), first_lanes(cols - j));
  }
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// Pair i is the token tokens[i] and the expert e with starts[e] <= i < starts[e + 1]: x[tokens[i]] times e's matrix -> out[i].
// biases [count][n] or null; alpha, limit and offset as in `Gate`.
void starling_grouped_linear(const bf16* x, int64_t x_stride, const int64_t* tokens, const int64_t* starts, int64_t count,
                             const bf16* packed, int64_t n, int64_t k, const bf16* biases, int gated, float alpha, float limit,
                             float offset, bf16* out, int threads) {
  const Bf16Experts experts{{tokens, starts, count}, packed, n, k};
  GroupedLinear<Bf16Experts>{experts, x, x_stride, biases, gated != 0, {alpha, limit, offset}, out}.run(threads);
}

// x[i] times the matrix of pair i's expert, times weights[i], added up over the pairs of each token -> out [num_tokens][n].
void starling_grouped_sum(const bf16* x, const int64_t* tokens, const float* weights, const int64_t* starts, int64_t count,
                          const bf16* packed, int64_t n, int64_t k, const bf16* biases, bf16* out, int64_t num_tokens, int threads) {
  GroupedSum<Bf16Experts>{{{tokens, starts, count}, packed, n, k}, x, weights, biases, num_tokens, out}.run(threads);
}

// The same two with weights as starling_pack_fp8 packs them, one behind the other.
void starling_grouped_fp8_linear(const bf16* x, int64_t x_stride, const int64_t* tokens, const int64_t* starts, int64_t count,
                                 const uint8_t* packed, const float* scales, int64_t n, int64_t k, int64_t groups,
                                 const bf16* biases, int gated, float alpha, float limit, float offset, bf16* out, int threads) {
  const Fp8Experts experts{{tokens, starts, count}, reinterpret_cast<const fp8_weight*>(packed), scales, n, k, groups};
  GroupedLinear<Fp8Experts>{experts, x, x_stride, biases, gated != 0, {alpha, limit, offset}, out}.run(threads);
}

void starling_grouped_fp8_sum(const bf16* x, const int64_t* tokens, const float* weights, const int64_t* starts, int64_t count,
                              const uint8_t* packed, const float* scales, int64_t n, int64_t k, int64_t groups,
                              const bf16* biases, bf16* out, int64_t num_tokens, int threads) {
  const Fp8Experts experts{{tokens, starts, count}, reinterpret_cast<const fp8_weight*>(packed), scales, n, k, groups};
  GroupedSum<Fp8Experts>{experts, x, weights, biases, num_tokens, out}.run(threads);
}

}  // extern "C"

STARLING_RECORDABLE(starling_grouped_linear)
STARLING_RECORDABLE(starling_grouped_sum)
STARLING_RECORDABLE(starling_grouped_fp8_linear)
STARLING_RECORDABLE(starling_grouped_fp8_sum)
