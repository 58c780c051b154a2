// The scan of a state-space layer (Mamba-2, arXiv 2405.21060, section 5). Columns of a head's state do not know of each other. Rows
// of the state are read once for a few tokens, which change them one after the other in registers; of a decode that is one token.
//
// With S the state before a token, d its decay and s its step size:
//
//   S := d S + b (s x)',   out = S'c + skip x
#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "recurrent_state.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

constexpr int kColumns = 16;
// Blocks of columns that a decode runs side by side, as the state lies in memory, and tokens that a prompt runs in registers.
constexpr int kBlocks = 4 / kParts, kTokens = 4 / kParts;
// Tokens whose inputs are made ready at once, for all columns.
constexpr int64_t kPiece = 32;
// Rows before it is changed that a decode fetches a row of the state.
constexpr int64_t kRowsAhead = 16;

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
struct SsdScan {
  const T* x;  // [tokens][heads][dim], in rows of x_stride
  const T* b;  // [tokens][groups][size]
  const T* c;
  const T* dt;  // [tokens][heads]
  int64_t x_stride, b_stride, c_stride, dt_stride;
  const float* a_log;
  const float* skip;
  const float* dt_bias;
  float dt_low, dt_high;
  int64_t heads, groups, dim, size;
  T* out;
  StateRows state;  // a row for each head: [size][dim]
  StepSequences step;

  int64_t blocks() const { return ceil_div(dim, kColumns); }

  // Runs blocks of columns [begin, end) of a head through a sequence's tokens.
  void run(int64_t s, int64_t head, int64_t begin, int64_t end) const {
    const int64_t row = ceil_div(size, 16) * 16, width = (end - begin) * kColumns, tokens = step.run(s);
    const int64_t start = begin * kColumns, columns = std::min(width, dim - start), pieces = std::min(kPiece, tokens);
    Scratch& scratch = Scratch::mine();
    const int64_t copied = step.takes(s) ? 0 : size * width;
    scratch.reset((pieces * (2 * row + width) + copied) * sizeof(float) + 4 * 64);
    float* keys = scratch.take<float>(pieces * row);
    float* queries = scratch.take<float>(pieces * row);
    float* values = scratch.take<float>(pieces * width);
    // What the state does not take in changes a copy of it.
    float* own = copied ? scratch.take<float>(copied) : nullptr;
    float* in_pool = state.row(s, head) + start;
    const int64_t stride = own ? width : dim;
    float* head_state = own ? own : in_pool;
    if (own && !step.is_first(s))
      for (int64_t r = 0; r < size; ++r) copy(in_pool + r * dim, columns, 1.0f, own + r * stride);
    const float forgetting = std::exp(a_log[head]);
    const int64_t group = head / (heads / groups) * size, at = head * dim + start;
    float decays[kPiece];
    for (int64_t t = 0; t < tokens; t += kPiece) {
      const int64_t count = std::min(kPiece, tokens - t), token = step.begin(s) + t;
      for (int64_t i = 0; i < count; ++i) {
        const float raw = softplus(to_float(dt[(token + i) * dt_stride + head]) + dt_bias[head]);
        const float step_size = std::min(std::max(raw, dt_low), dt_high);
        decays[i] = std::exp(-forgetting * step_size);
        copy(b + (token + i) * b_stride + group, size, 1.0f, keys + i * row);
        copy(c + (token + i) * c_stride + group, size, 1.0f, queries + i * row);
        copy(x + (token + i) * x_stride + at, columns, step_size, values + i * width);
      }
      const Piece piece{row, width, stride, keys, queries, values, decays};
      const bool fresh = t == 0 && step.is_first(s);
      if (count == 1) {
        for (int64_t column = 0; column < columns; column += kBlocks * kColumns)
          run_wide(piece, column, columns - column, fresh, head_state + column);
      } else {
        for (int64_t column = 0; column < columns; column += kColumns)
          run_block(piece, count, column, first_lanes(columns - column), fresh, head_state + column);
      }
      for (int64_t i = 0; i < count; ++i) {
        const T* input = x + (token + i) * x_stride + at;
        T* to = out + (token + i) * heads * dim + at;
        for (int64_t j = 0; j < columns; j += kColumns) {
          const Lanes lanes = first_lanes(columns - j);
          store16(to + j, multiply_add(load16(input + j, lanes), splat16(skip[head]), load16(values + i * width + j)), lanes);
        }
      }
    }
  }

 private:
  // Some tokens of a sequence. Values are multiplied by their step size.
  struct Piece {
    int64_t row, width, stride;  // `stride` of the state's rows
    const float* keys;  // [count][row]
    const float* queries;
    float* values;  // [count][width]; results take their place
    const float* decays;
  };

  template <typename From>
  static void copy(const From* from, int64_t n, float by, float* to) {
    const Floats factor = splat16(by);
    for (int64_t i = 0; i < n; i += 16) store16(to + i, load16(from + i, first_lanes(n - i)) * factor);
  }

  // A decode: some blocks side by side, of which there are `columns`, row by row.
  void run_wide(const Piece& piece, int64_t column, int64_t columns, bool fresh, float* at) const {
    const int64_t count = std::min<int64_t>(kBlocks, ceil_div(columns, kColumns));
    if (count == kBlocks) return fresh ? wide<true, kBlocks>(piece, column, columns, at) : wide<false, kBlocks>(piece, column, columns, at);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t from = i * kColumns;
      fresh ? wide<true, 1>(piece, column + from, columns - from, at + from)
            : wide<false, 1>(piece, column + from, columns - from, at + from);
    }
  }

  template <bool kFresh, int kCount>
  void wide(const Piece& piece, int64_t column, int64_t columns, float* at) const {
    const Floats decay = splat16(piece.decays[0]);
    const Lanes last = first_lanes(columns - (kCount - 1) * kColumns);
    Floats values[kCount], sums[kCount];
    for (int i = 0; i < kCount; ++i) values[i] = load16(piece.values + column + i * kColumns), sums[i] = splat16(0.0f);
    for (int64_t r = 0; r < size; ++r) {
      const Floats key = splat16(piece.keys[r]), query = splat16(piece.queries[r]);
      float* line = at + r * piece.stride;
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        const Lanes lanes = i + 1 < kCount ? kAllLanes : last;
        Floats s = splat16(0.0f);
        if constexpr (!kFresh) {
          fetch(line + kRowsAhead * piece.stride + i * kColumns);
          s = load16(line + i * kColumns, lanes) * decay;
        }
        s = multiply_add(key, values[i], s);
        store16(line + i * kColumns, s, lanes);
        sums[i] = multiply_add(query, s, sums[i]);
      }
    }
    for (int i = 0; i < kCount; ++i) store16(piece.values + column + i * kColumns, sums[i]);
  }

  // A block of columns of a prompt: some tokens at a time.
  void run_block(const Piece& piece, int64_t count, int64_t column, Lanes lanes, bool fresh, float* at) const {
    int64_t t = 0;
    for (; t + kTokens <= count; t += kTokens, fresh = false)
      fresh ? tokens<true, kTokens>(piece, t, column, lanes, at) : tokens<false, kTokens>(piece, t, column, lanes, at);
    for (; t < count; ++t, fresh = false)
      fresh ? tokens<true, 1>(piece, t, column, lanes, at) : tokens<false, 1>(piece, t, column, lanes, at);
  }

  template <bool kFresh, int kCount>
  void tokens(const Piece& piece, int64_t t, int64_t column, Lanes lanes, float* at) const {
    const float* keys = piece.keys + t * piece.row;
    const float* queries = piece.queries + t * piece.row;
    float* rows = piece.values + t * piece.width + column;
    Floats values[kCount], sums[kCount], decays[kCount];
    for (int i = 0; i < kCount; ++i) {
      values[i] = load16(rows + i * piece.width);
      decays[i] = splat16(piece.decays[t + i]);
      sums[i] = splat16(0.0f);
    }
    for (int64_t r = 0; r < size; ++r) {
      Floats s = splat16(0.0f);
      if constexpr (!kFresh) s = load16(at + r * piece.stride, lanes);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        s = multiply_add(splat16(keys[i * piece.row + r]), values[i], s * decays[i]);
        sums[i] = multiply_add(splat16(queries[i * piece.row + r]), s, sums[i]);
      }
      store16(at + r * piece.stride, s, lanes);
    }
    for (int i = 0; i < kCount; ++i) store16(rows + i * piece.width, sums[i]);
  }
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// x, b, c, dt are tokens' rows, each with its stride; out [tokens, heads, dim]. For the state see `StateRows`.
void starling_ssd_scan(const void* x, const void* b, const void* c, const void* dt, int64_t x_stride, int64_t b_stride,
                       int64_t c_stride, int64_t dt_stride, const float* a_log, const float* skip, const float* dt_bias,
                       float dt_low, float dt_high, int64_t heads, int64_t groups, int64_t dim, int64_t size, void* out,
                       float* storage, int64_t block_stride, const int32_t* tables, int64_t width, int64_t column,
                       int64_t per_block, int64_t first, const int64_t* slots, const int32_t* query_start,
                       const int32_t* context_lens, const int32_t* taken, int64_t sequences, int fp32, int threads) {
  const StateRows state{storage, block_stride, tables, width, column, per_block, first, size * dim};
  const StepSequences step{slots, query_start, context_lens, taken, sequences};
  const auto run = [&](auto type) {
    using T = decltype(type);
    const SsdScan<T> work{static_cast<const T*>(x), static_cast<const T*>(b), static_cast<const T*>(c), static_cast<const T*>(dt),
                          x_stride, b_stride, c_stride, dt_stride, a_log, skip, dt_bias, dt_low, dt_high, heads, groups, dim, size,
                          static_cast<T*>(out), state, step};
    // A head's columns share the work of its group's rows, unless there are too few heads for the threads.
    const int64_t all = sequences * heads, parts = all < 4 * threads ? work.blocks() : 1;
    const int64_t bytes = step.tokens() * heads * dim * size * sizeof(float);
    each_in_turn(all * parts, threads_for(all * parts, bytes, threads), [&](int64_t i) {
      const int64_t s = i / parts / heads, head = i / parts % heads;
      const Span blocks = Part{static_cast<int>(i % parts), static_cast<int>(parts)}.of(work.blocks());
      if (step.is_real(s)) work.run(s, head, blocks.begin, blocks.end);
    });
  };
  fp32 ? run(float{}) : run(bf16{});
}

}  // extern "C"

STARLING_RECORDABLE(starling_ssd_scan)
