// A causal convolution of each channel with its last inputs, which the recurrent state keeps between steps.
#include "parallel.h"
#include "recurrent_state.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

// Channels of a piece of work. A row of as many bf16 is 16 cache lines.
constexpr int64_t kChannels = 512;

template <typename T>
struct Convolution {
  const T* x;
  int64_t stride;
  const float* weight;  // [taps][channels], the oldest input's first
  const float* bias;    // [channels] or null
  int64_t channels, taps;
  bool with_silu;
  T* out;
  StateRows state;  // taps - 1 rows, the oldest input first
  StepSequences step;

  void run(int64_t s, int64_t begin, int64_t end) const {
    const Inputs inputs{x + step.begin(s) * stride, stride, &state, s, taps - 1, step.is_first(s)};
    T* to = out + step.begin(s) * channels;
    for (int64_t t = 0; t < step.run(s); ++t)
      for (int64_t c = begin; c < end; c += 16) convolve(inputs, t, c, first_lanes(end - c), to + t * channels);
    if (step.takes(s)) keep(inputs, step.run(s), begin, end);
  }

 private:
  // A sequence's inputs by their place in the step; those before it are in the state.
  struct Inputs {
    const T* x;
    int64_t stride;
    const StateRows* state;
    int64_t sequence, kept;
    bool is_first;

    Floats at(int64_t i, int64_t c, Lanes lanes) const {
      if (i >= 0) return load16(x + i * stride + c, lanes);
      return is_first ? splat16(0.0f) : load16(state->row(sequence, kept + i) + c, lanes);
    }
  };

  void convolve(const Inputs& inputs, int64_t t, int64_t c, Lanes lanes, T* row) const {
    Floats sum = bias ? load16(bias + c, lanes) : splat16(0.0f);
    for (int64_t j = 0; j < taps; ++j)
      sum = multiply_add(inputs.at(t + 1 - taps + j, c, lanes), load16(weight + j * channels + c, lanes), sum);
    store16(row + c, with_silu ? silu(sum) : sum, lanes);
  }

  // Row r gets what is now the input before the last taps - 2 - r. Of a short step that is an old one of a later row.
  void keep(const Inputs& inputs, int64_t tokens, int64_t begin, int64_t end) const {
    for (int64_t r = 0; r < taps - 1; ++r)
      for (int64_t c = begin; c < end; c += 16) {
        const Lanes lanes = first_lanes(end - c);
        store16(state.row(inputs.sequence, r) + c, inputs.at(tokens + 1 - taps + r, c, lanes), lanes);
      }
  }
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// x [tokens, channels] in rows of `stride` -> out, without gaps. For the weights see `Convolution`, for the state `StateRows`.
void starling_short_convolution(const void* x, int64_t stride, const float* weight, const float* bias, int64_t channels,
                                int64_t taps, int with_silu, void* out, float* storage, int64_t block_stride,
                                const int32_t* tables, int64_t width, int64_t column, int64_t per_block, int64_t first,
                                const int64_t* slots, const int32_t* query_start, const int32_t* context_lens,
                                const int32_t* taken, int64_t sequences, int fp32, int threads) {
  const StateRows state{storage, block_stride, tables, width, column, per_block, first, channels};
  const StepSequences step{slots, query_start, context_lens, taken, sequences};
  const auto run = [&](auto type) {
    using T = decltype(type);
    const Convolution<T> work{static_cast<const T*>(x), stride, weight, bias, channels, taps, with_silu != 0,
                              static_cast<T*>(out),     state,  step};
    const int64_t pieces = ceil_div(channels, kChannels);
    const int64_t bytes = channels * (3 * taps * sequences * sizeof(float) + 2 * step.tokens() * sizeof(T));
    each_in_turn(sequences * pieces, threads_for(sequences * pieces, bytes, threads), [&](int64_t i) {
      const int64_t s = i / pieces, begin = i % pieces * kChannels;
      if (step.is_real(s)) work.run(s, begin, std::min(channels, begin + kChannels));
    });
  };
  fp32 ? run(float{}) : run(bf16{});
}

}  // extern "C"

STARLING_RECORDABLE(starling_short_convolution)
