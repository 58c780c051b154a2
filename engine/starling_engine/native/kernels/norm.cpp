// Row by row, bound by memory: RMS normalisation, with the residual added before it or a gate behind it, and gates.
#include <cmath>
#include <type_traits>

#include "parallel.h"
#include "simd.h"
#include "replay.h"

namespace starling {
namespace {

inline float inverse_rms(float sum_of_squares, int64_t k, float eps) {
  return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(k) + eps);
}

// x * rms^-1, rounded to W before the weight, as in the models' own code: not at all where weights are float.
template <typename T, typename W>
inline void normalise(const T* x, const W* weight, float by, int64_t k, T* out) {
  each_16(k, [&](int64_t i, Lanes lanes) {
    const Floats unit = rounded<W>(load16(x + i, lanes) * splat16(by));
    store16(out + i, unit * load16(weight + i, lanes), lanes);
  });
}

// With a residual, adds residual += x and normalises that; else (null) normalises x.
template <typename T, typename W>
void rms_norm(const T* x, int64_t x_stride, T* residual, const W* weight, float eps, T* out, int64_t out_stride, int64_t tokens,
              int64_t k, int threads) {
  parallel_for(tokens, threads_for(tokens, tokens * k * sizeof(T), threads), [&](int64_t t) {
    const T* row = x + t * x_stride;
    T* sum_row = residual ? residual + t * k : nullptr;
    Floats squares = splat16(0.0f);
    each_16(k, [&](int64_t i, Lanes lanes) {
      Floats v = load16(row + i, lanes);
      if (sum_row) {
        v = rounded<T>(v + load16(sum_row + i, lanes));
        store16(sum_row + i, v, lanes);
      }
      squares = multiply_add(v, v, squares);
    });
    normalise(sum_row ? sum_row : row, weight, inverse_rms(sum_of(squares), k, eps), k, out + t * out_stride);
  });
}

// How a gate opens: as it is, by its sigmoid, which is rounded as the models' own code does, or by its silu, which is not.
// `ops.py` has these names in this order.
enum class Opening { kAsItIs, kSigmoid, kSilu };

template <Opening kOpening, typename T>
inline Floats opened(Floats gate) {
  return kOpening == Opening::kSigmoid ? rounded<T>(sigmoid(gate)) : kOpening == Opening::kSilu ? silu(gate) : gate;
}

// x times the opened gate: of each element, or of each `width` / `gates` of them.
template <Opening kOpening, typename T>
void gate_mul(const T* x, int64_t x_stride, const T* gate, int64_t gate_stride, T* out, int64_t tokens, int64_t gates, int64_t width,
              int threads) {
  const int64_t each = width / gates;
  parallel_for(tokens, threads_for(tokens, tokens * width * 3 * sizeof(T), threads), [&](int64_t t) {
    const T* in = x + t * x_stride;
    const T* opening = gate + t * gate_stride;
    T* to = out + t * width;
    if (each == 1)
      each_16(width, [&](int64_t i, Lanes lanes) {
        store16(to + i, load16(in + i, lanes) * opened<kOpening, T>(load16(opening + i, lanes)), lanes);
      });
    else
      for (int64_t g = 0; g < gates; ++g, in += each, to += each) {
        const Floats open = opened<kOpening, T>(splat16(to_float(opening[g])));
        each_16(each, [&](int64_t i, Lanes lanes) { store16(to + i, load16(in + i, lanes) * open, lanes); });
      }
  });
}

// Each head of `dim`, normalised, rounded to T before the weight and to W after it, and opened by the gate's silu; or opened first; or
// opened by its sigmoid, and rounded at the end alone. The weights of a head begin `weight_step` behind those of the one before: 0
// where all have the same.
enum class Gate { kLast, kFirst, kSigmoid };

template <Gate kGate, typename T, typename W>
void gated_rms_norm(const T* x, int64_t x_stride, const T* gate, int64_t gate_stride, const W* weight, int64_t weight_step, float eps,
                    T* out, int64_t tokens, int64_t heads, int64_t dim, int threads) {
  const int64_t width = heads * dim;
  parallel_for(tokens, threads_for(tokens, tokens * width * 3 * sizeof(T), threads), [&](int64_t t) {
    for (int64_t h = 0; h < heads; ++h) {
      const T* in = x + t * x_stride + h * dim;
      const T* opening = gate + t * gate_stride + h * dim;
      const W* weights = weight + h * weight_step;
      const auto input = [&](int64_t i, Lanes lanes) {
        const Floats v = load16(in + i, lanes);
        return kGate == Gate::kFirst ? v * silu(load16(opening + i, lanes)) : v;
      };
      Floats squares = splat16(0.0f);
      each_16(dim, [&](int64_t i, Lanes lanes) {
        const Floats v = input(i, lanes);
        squares = multiply_add(v, v, squares);
      });
      const Floats by = splat16(inverse_rms(sum_of(squares), dim, eps));
      each_16(dim, [&](int64_t i, Lanes lanes) {
        const Floats unit = input(i, lanes) * by, by_column = load16(weights + i, lanes);
        const Floats weighted = rounded<W>(rounded<T>(unit) * by_column);
        const Floats opened = kGate == Gate::kFirst     ? weighted
                              : kGate == Gate::kSigmoid ? unit * by_column * sigmoid(load16(opening + i, lanes))
                                                        : weighted * silu(load16(opening + i, lanes));
        store16(out + t * width + h * dim + i, opened, lanes);
      });
    }
  });
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// x [tokens, k] -> out, which may be x, in rows of their strides. With a residual [tokens][k]: residual += x, and that is normalised.
// `wide`: weights are float.
void starling_rms_norm(const void* x, int64_t x_stride, void* residual, const void* weight, float eps, void* out, int64_t out_stride,
                       int64_t tokens, int64_t k, int fp32, int wide, int threads) {
  const auto run = [&](auto type, auto weights) {
    using T = decltype(type);
    rms_norm(static_cast<const T*>(x), x_stride, static_cast<T*>(residual), static_cast<const decltype(weights)*>(weight), eps,
             static_cast<T*>(out), out_stride, tokens, k, threads);
  };
  if (fp32) return run(float{}, float{});
  wide ? run(bf16{}, float{}) : run(bf16{}, bf16{});
}

// x [tokens, width] and gate [tokens, gates], in rows of their strides -> out: x times the gate, which opens as `Opening` numbers it.
void starling_gate_mul(const void* x, int64_t x_stride, const void* gate, int64_t gate_stride, void* out, int64_t tokens,
                       int64_t gates, int64_t width, int opening, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const auto kernel = opening == 1   ? gate_mul<Opening::kSigmoid, T>
                        : opening == 2 ? gate_mul<Opening::kSilu, T>
                                       : gate_mul<Opening::kAsItIs, T>;
    kernel(static_cast<const T*>(x), x_stride, static_cast<const T*>(gate), gate_stride, static_cast<T*>(out), tokens, gates, width,
           threads);
  };
  fp32 ? run(float{}) : run(bf16{});
}

// x, gate [tokens, heads, dim], in rows of their strides -> out: x's heads normalised * weight * silu(gate), or the gate comes first, or
// it is sigmoid(gate). `weight_step`: as in `gated_rms_norm`; `wide`: as above.
void starling_gated_rms_norm(const void* x, int64_t x_stride, const void* gate, int64_t gate_stride, const void* weight,
                             int64_t weight_step, float eps, void* out, int64_t tokens, int64_t heads, int64_t dim, int gate_first,
                             int fp32, int wide, int with_sigmoid, int threads) {
  const auto run = [&](auto type, auto weights) {
    using T = decltype(type);
    using W = decltype(weights);
    const auto kernel = with_sigmoid ? gated_rms_norm<Gate::kSigmoid, T, W>
                        : gate_first ? gated_rms_norm<Gate::kFirst, T, W>
                                     : gated_rms_norm<Gate::kLast, T, W>;
    kernel(static_cast<const T*>(x), x_stride, static_cast<const T*>(gate), gate_stride, static_cast<const W*>(weight), weight_step,
           eps, static_cast<T*>(out), tokens, heads, dim, threads);
  };
  if (fp32) return run(float{}, float{});
  wide ? run(bf16{}, float{}) : run(bf16{}, bf16{});
}

}  // extern "C"

STARLING_RECORDABLE(starling_rms_norm)
STARLING_RECORDABLE(starling_gate_mul)
STARLING_RECORDABLE(starling_gated_rms_norm)
