// The selective scan of Mamba (arXiv 2312.00752, section 3.2). Channels do not know of each other: a vector has 16 of them, each
// with a row's element of its own. A decode reads rows of the state as they lie in memory; of a prompt, the state of a few channels
// stays in the first cache while some tokens change it.
//
// With S the state of a channel before a token, s its step size, and r its rates:
//
//   S := exp(-r s) S + b s x,   out = (S'c + skip x) silu(gate)
#include <algorithm>

#include "parallel.h"
#include "recurrent_state.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

// Channels of a piece of work, and tokens of a prompt whose inputs are made ready at once for all of these.
constexpr int64_t kChannels = 256, kPiece = 32;

template <typename T>
struct SelectiveScan {
  const T* x;  // [tokens][channels], in rows of x_stride
  const T* gate;
  const T* dt;
  const T* b;  // [tokens][size]
  const T* c;
  int64_t x_stride, gate_stride, dt_stride, b_stride, c_stride;
  const float* rates;  // [size][channels]
  const float* skip;   // [channels]
  const float* dt_bias;
  int64_t channels, size;
  T* out;
  StateRows state;  // `size` rows of all channels
  StepSequences step;

  // Runs channels [begin, end) through a sequence's tokens.
  void run(int64_t s, int64_t begin, int64_t end) const {
    const int64_t tokens = step.run(s), count = std::min(kPiece, tokens), width = ceil_div(end - begin, 16) * 16;
    Scratch& scratch = Scratch::mine();
    const int64_t copied = step.takes(s) ? 0 : size * width;
    scratch.reset((2 * count * width + 2 * size * 16 + copied) * sizeof(float) + 5 * 64);
    float* steps = scratch.take<float>(count * width);
    float* values = scratch.take<float>(count * width);
    float* block = scratch.take<float>(size * 16);
    float* block_rates = scratch.take<float>(size * 16);
    // What the state does not take in changes a copy of it.
    float* own = copied ? scratch.take<float>(copied) : nullptr;
    for (int64_t r = 0; own && !step.is_first(s) && r < size; ++r) {
      const float* line = state.row(s, r) + begin;
      for (int64_t j = 0; j < end - begin; j += 16) store16(own + r * width + j, load16(line + j, first_lanes(end - begin - j)));
    }
    for (int64_t t = 0; t < tokens; t += kPiece) {
      const Piece piece{s, step.begin(s) + t, std::min(kPiece, tokens - t), begin, end, width, steps, values, own};
      const bool fresh = t == 0 && step.is_first(s);
      prepare(piece);
      if (tokens == 1) {
        fresh ? decode<true>(piece) : decode<false>(piece);
      } else {
        for (int64_t j = 0; j < end - begin; j += 16) run_block(piece, j, fresh, block, block_rates);
      }
      finish(piece);
    }
  }

 private:
  // Some tokens of a sequence, and some channels.
  struct Piece {
    int64_t sequence, token, count, begin, end, width;
    float* steps;   // [count][width]: step sizes
    float* values;  // [count][width]: inputs, multiplied by these; the sums take their place
    float* own;     // [size][width]: a copy of the state, or null

    Lanes lanes(int64_t j) const { return first_lanes(end - begin - j); }
  };

  // The piece's channels of row r of the state.
  float* row(const Piece& piece, int64_t r) const {
    return piece.own ? piece.own + r * piece.width : state.row(piece.sequence, r) + piece.begin;
  }

  void prepare(const Piece& piece) const {
    for (int64_t i = 0; i < piece.count; ++i) {
      const T* inputs = x + (piece.token + i) * x_stride + piece.begin;
      const T* raw = dt + (piece.token + i) * dt_stride + piece.begin;
      for (int64_t j = 0; j < piece.end - piece.begin; j += 16) {
        const Lanes lanes = piece.lanes(j);
        const Floats size = softplus(load16(raw + j, lanes) + load16(dt_bias + piece.begin + j, lanes));
        store16(piece.steps + i * piece.width + j, size);
        store16(piece.values + i * piece.width + j, load16(inputs + j, lanes) * size);
      }
    }
  }

  // Sums of a decode lie behind its values.
  template <bool kFresh>
  void decode(const Piece& piece) const {
    alignas(64) float sums[kChannels];
    std::fill(sums, sums + piece.width, 0.0f);
    for (int64_t r = 0; r < size; ++r) {
      const Floats key = splat16(to_float(b[piece.token * b_stride + r])), query = splat16(to_float(c[piece.token * c_stride + r]));
      const float* rate = rates + r * channels + piece.begin;
      float* line = row(piece, r);
      for (int64_t j = 0; j < piece.end - piece.begin; j += 16) {
        const Lanes lanes = piece.lanes(j);
        Floats now = splat16(0.0f);
        if constexpr (!kFresh) now = load16(line + j, lanes) * decay(load16(rate + j, lanes) * splat16(-kLog2E), load16(piece.steps + j));
        now = multiply_add(key, load16(piece.values + j), now);
        store16(line + j, now, lanes);
        store16(sums + j, multiply_add(query, now, load16(sums + j)));
      }
    }
    std::copy(sums, sums + piece.width, piece.values);
  }

  // Sixteen channels of a prompt's tokens, from channel `j` of the piece on.
  void run_block(const Piece& piece, int64_t j, bool fresh, float* block, float* block_rates) const {
    const Lanes lanes = piece.lanes(j);
    const int64_t at = piece.begin + j;
    for (int64_t r = 0; r < size; ++r) {
      store16(block_rates + r * 16, load16(rates + r * channels + at, lanes) * splat16(-kLog2E));
      store16(block + r * 16, fresh ? splat16(0.0f) : load16(row(piece, r) + j, lanes));
    }
    for (int64_t i = 0; i < piece.count; ++i) {
      const T* keys = b + (piece.token + i) * b_stride;
      const T* queries = c + (piece.token + i) * c_stride;
      float* row = piece.values + i * piece.width + j;
      const Floats size_now = load16(piece.steps + i * piece.width + j), value = load16(row);
      Floats sum = splat16(0.0f);
      for (int64_t r = 0; r < size; ++r) {
        const Floats kept = load16(block + r * 16) * decay(load16(block_rates + r * 16), size_now);
        const Floats now = multiply_add(splat16(to_float(keys[r])), value, kept);
        store16(block + r * 16, now);
        sum = multiply_add(splat16(to_float(queries[r])), now, sum);
      }
      store16(row, sum);
    }
    for (int64_t r = 0; r < size; ++r) store16(row(piece, r) + j, load16(block + r * 16), lanes);
  }

  void finish(const Piece& piece) const {
    for (int64_t i = 0; i < piece.count; ++i) {
      const T* inputs = x + (piece.token + i) * x_stride + piece.begin;
      const T* opening = gate + (piece.token + i) * gate_stride + piece.begin;
      T* to = out + (piece.token + i) * channels + piece.begin;
      for (int64_t j = 0; j < piece.end - piece.begin; j += 16) {
        const Lanes lanes = piece.lanes(j);
        const Floats sums = load16(piece.values + i * piece.width + j);
        const Floats all = multiply_add(load16(inputs + j, lanes), load16(skip + piece.begin + j, lanes), sums);
        store16(to + j, all * silu(load16(opening + j, lanes)), lanes);
      }
    }
  }

  // `rates` are negative, and of powers of 2.
  static Floats decay(Floats rates, Floats size) { return exp2(rates * size); }
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// x, gate, dt, b, c are tokens' rows, each with its stride; out [tokens, channels]. For the state see `StateRows`.
void starling_selective_scan(const void* x, const void* gate, const void* dt, const void* b, const void* c, int64_t x_stride,
                             int64_t gate_stride, int64_t dt_stride, int64_t b_stride, int64_t c_stride, const float* rates,
                             const float* skip, const float* dt_bias, int64_t channels, int64_t size, void* out, float* storage,
                             int64_t block_stride, const int32_t* tables, int64_t width, int64_t column, int64_t per_block,
                             int64_t first, const int64_t* slots, const int32_t* query_start, const int32_t* context_lens,
                             const int32_t* taken, int64_t sequences, int fp32, int threads) {
  const StateRows state{storage, block_stride, tables, width, column, per_block, first, channels};
  const StepSequences step{slots, query_start, context_lens, taken, sequences};
  const auto run = [&](auto type) {
    using T = decltype(type);
    const SelectiveScan<T> work{static_cast<const T*>(x), static_cast<const T*>(gate), static_cast<const T*>(dt),
                                static_cast<const T*>(b), static_cast<const T*>(c), x_stride, gate_stride, dt_stride, b_stride,
                                c_stride, rates, skip, dt_bias, channels, size, static_cast<T*>(out), state, step};
    const int64_t pieces = ceil_div(channels, kChannels);
    const int64_t bytes = channels * size * (3 * sequences + step.tokens()) * sizeof(float);
    each_in_turn(sequences * pieces, threads_for(sequences * pieces, bytes, threads), [&](int64_t i) {
      const int64_t s = i / pieces, begin = i % pieces * kChannels;
      if (step.is_real(s)) work.run(s, begin, std::min(channels, begin + kChannels));
    });
  };
  fp32 ? run(float{}) : run(bf16{});
}

}  // extern "C"

STARLING_RECORDABLE(starling_selective_scan)
