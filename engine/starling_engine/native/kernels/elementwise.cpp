// Element by element: activations of an MLP, sums and multiples of the residual stream, and what becomes of logits.
#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

// x times the normal distribution's share below x: max(x, 0) - |x| / 2 erfc(|x| / sqrt(2)). As in Abramowitz and Stegun 7.1.26,
// erfc(a) is exp(-a^2) times a polynomial of 1 / (1 + p a); with three terms more than there it is within 1e-7 of itself.
inline Floats gelu(Floats x) {
  const Floats zero = splat16(0.0f), size = highest(zero - x, x);
  const Floats t = splat16(1.0f) / multiply_add(size, splat16(0.3275911f * 0.70710678f), splat16(1.0f));
  Floats sum = splat16(-0.1427245996f);
  for (const float c : {0.5034639685f, -0.4178490208f, 0.4645604415f, 0.01921037173f, 0.2078701133f, 0.180392033f, 0.1850767675f})
    sum = multiply_add(sum, t, splat16(c));
  const Floats tail = sum * t * exp2(x * x * splat16(-0.5f * kLog2E));
  return highest(zero, x) - splat16(0.5f) * size * tail;
}

inline Floats relu(Floats x) { return highest(splat16(0.0f), x); }

// Calls run with the activation of this number; `elementwise_ops.py` has their names.
template <typename Run>
inline void with_activation(int number, Run run) {
  switch (number) {
    case 0: return run([](Floats x) { return silu(x); });
    case 1: return run([](Floats x) { return gelu(x); });
    case 2: return run([](Floats x) { return tanh_gelu(x); });
    case 3: return run([](Floats x) { return relu(x); });
    default: return run([](Floats x) { return relu(x) * relu(x); });
  }
}

// exp(x) - 1 - x for x of at most 0: near it the first terms of the series, since the difference would lose them.
inline Floats expm1_less_x(Floats x) {
  const Floats one = splat16(1.0f);
  Floats sum = one;
  for (const float n : {11.0f, 10.0f, 9.0f, 8.0f, 7.0f, 6.0f, 5.0f, 4.0f, 3.0f}) sum = multiply_add(sum * x, splat16(1 / n), one);
  return choose(above(x, splat16(-1.0f)), x * x * splat16(0.5f) * sum, exp(x) - one - x);
}

// xIELU (arXiv 2411.13010): p x^2 + beta x above 0, else n (exp(m) - 1 - x) + beta x with m = min(x, eps). The slopes p and n are
// made of their parameters, and rounded as the models' own code does.
template <typename T>
void xielu(const T* x, T* out, int64_t tokens, int64_t width, const T* alpha_p, const T* alpha_n, const T* beta, const T* eps,
           int threads) {
  const auto number = [](const T* at) { return splat16(to_float(*at)); };
  const Floats p = rounded<T>(softplus(number(alpha_p))), b = number(beta), most = number(eps);
  const Floats n = rounded<T>(b + rounded<T>(softplus(number(alpha_n))));
  parallel_for(tokens, threads_for(tokens, tokens * width * 2 * sizeof(T), threads), [&](int64_t t) {
    each_16(width, [&](int64_t i, Lanes lanes) {
      const Floats v = load16(x + t * width + i, lanes), m = lowest(most, v);
      const Floats y = choose(above(v, splat16(0.0f)), p * v * v, n * (expm1_less_x(m) + (m - v)));
      store16(out + t * width + i, multiply_add(b, v, y), lanes);
    });
  });
}

// Gated, rows of x are gate and up, and the gate is rounded before it is multiplied with up, as in the models' own code.
template <bool kGated, typename T, typename F>
void activate(F activation, const T* x, T* out, int64_t tokens, int64_t width, int threads) {
  const int64_t row = kGated ? 2 * width : width;
  parallel_for(tokens, threads_for(tokens, tokens * (row + width) * sizeof(T), threads), [&](int64_t t) {
    const T* in = x + t * row;
    each_16(width, [&](int64_t i, Lanes lanes) {
      const Floats y = activation(load16(in + i, lanes));
      store16(out + t * width + i, kGated ? rounded<T>(y) * load16(in + width + i, lanes) : y, lanes);
    });
  });
}

template <typename T>
void add_multiple(const T* x, int64_t x_stride, float by, bool adds, T* out, int64_t out_stride, int64_t tokens, int64_t width,
                  int threads) {
  const Floats factor = splat16(by);
  parallel_for(tokens, threads_for(tokens, tokens * width * 3 * sizeof(T), threads), [&](int64_t t) {
    T* to = out + t * out_stride;
    each_16(width, [&](int64_t i, Lanes lanes) {
      const Floats v = load16(x + t * x_stride + i, lanes);
      store16(to + i, adds ? multiply_add(v, factor, load16(to + i, lanes)) : v * factor, lanes);
    });
  });
}

// Multiplies row t by factor(t), which is rounded to T first.
template <typename T, typename F>
void multiply_rows(const T* x, int64_t x_stride, F factor, T* out, int64_t out_stride, int64_t tokens, int64_t width, int threads) {
  parallel_for(tokens, threads_for(tokens, tokens * width * 2 * sizeof(T), threads), [&](int64_t t) {
    const Floats by = rounded<T>(factor(t));
    each_16(width, [&](int64_t i, Lanes lanes) {
      store16(out + t * out_stride + i, load16(x + t * x_stride + i, lanes) * by, lanes);
    });
  });
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// x [tokens, width], or gated [tokens, 2 width] -> out [tokens, width]: the activation of x, which may be out, or that of the first
// half times the second.
void starling_activate(const void* x, void* out, int64_t tokens, int64_t width, int number, int gated, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    with_activation(number, [&](auto activation) {
      const auto kernel = gated ? activate<true, T, decltype(activation)> : activate<false, T, decltype(activation)>;
      kernel(activation, static_cast<const T*>(x), static_cast<T*>(out), tokens, width, threads);
    });
  };
  fp32 ? run(float{}) : run(bf16{});
}

// x [tokens, width] -> out, which may be x: xIELU by its four parameters, which have x's type.
void starling_xielu(const void* x, void* out, int64_t tokens, int64_t width, const void* alpha_p, const void* alpha_n, const void* beta,
                    const void* eps, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const auto of = [](const void* at) { return static_cast<const T*>(at); };
    xielu(of(x), static_cast<T*>(out), tokens, width, of(alpha_p), of(alpha_n), of(beta), of(eps), threads);
  };
  fp32 ? run(float{}) : run(bf16{});
}

// x [tokens, width] -> out, which may be x, in rows of their strides: out = by * x, or with `adds` out += by * x.
void starling_add_multiple(const void* x, int64_t x_stride, float by, int adds, void* out, int64_t out_stride, int64_t tokens,
                           int64_t width, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    add_multiple(static_cast<const T*>(x), x_stride, by, adds != 0, static_cast<T*>(out), out_stride, tokens, width, threads);
  };
  fp32 ? run(float{}) : run(bf16{});
}

// x [tokens, width] -> out, which may be x, in rows of their strides: row t times by[t * by_step], or times by[at[t] * by_step], where
// an index below 0 counts as 0; or times the sigmoid of that. `at` may be null; `wide`: factors are float.
void starling_multiply_rows(const void* x, int64_t x_stride, const void* by, int64_t by_step, const int64_t* at, int with_sigmoid,
                            void* out, int64_t out_stride, int64_t tokens, int64_t width, int fp32, int wide, int threads) {
  const auto run = [&](auto type, auto factors) {
    using T = decltype(type);
    const auto* factor = static_cast<const decltype(factors)*>(by);
    const auto factor_of = [&](int64_t t) {
      const Floats number = load16(factor + (at ? std::max<int64_t>(0, at[t]) : t) * by_step, first_lanes(1));
      return splat16(sum_of(with_sigmoid ? choose(first_lanes(1), sigmoid(number), splat16(0.0f)) : number));
    };
    multiply_rows(static_cast<const T*>(x), x_stride, factor_of, static_cast<T*>(out), out_stride, tokens, width, threads);
  };
  if (fp32) return run(float{}, float{});
  wide ? run(bf16{}, float{}) : run(bf16{}, bf16{});
}

// x [tokens, width] in rows of their stride, in place: row t times 1 + scale * log(1 + floor((positions[t] + first) / step)).
void starling_temper(void* x, int64_t x_stride, const int64_t* positions, float first, float step, float scale, int64_t tokens,
                     int64_t width, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const auto factor_of = [&](int64_t t) {
      const float steps = std::floor((static_cast<float>(positions[t]) + first) / step);
      return splat16(std::log1p(steps) * scale + 1.0f);
    };
    multiply_rows(static_cast<const T*>(x), x_stride, factor_of, static_cast<T*>(x), x_stride, tokens, width, threads);
  };
  fp32 ? run(float{}) : run(bf16{});
}

// Divides logits [count] by the divisor, in place; with a cap they become cap * tanh(logit / cap) then.
void starling_finish_logits(float* logits, int64_t count, float divisor, float cap, int threads) {
  constexpr int64_t kPiece = 4096;
  const int64_t pieces = ceil_div(count, kPiece);
  parallel_for(pieces, threads_for(pieces, count * sizeof(float), threads), [&](int64_t piece) {
    float* at = logits + piece * kPiece;
    each_16(std::min(kPiece, count - piece * kPiece), [&](int64_t i, Lanes lanes) {
      const Floats one = splat16(1.0f), x = load16(at + i, lanes) / splat16(divisor);
      // tanh(y) = 1 - 2 / (exp(2y) + 1)
      const Floats capped = splat16(cap) * (one - splat16(2.0f) / (exp(x * splat16(2 / cap)) + one));
      store16(at + i, cap > 0 ? capped : x, lanes);
    });
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_activate)
STARLING_RECORDABLE(starling_xielu)
STARLING_RECORDABLE(starling_add_multiple)
STARLING_RECORDABLE(starling_multiply_rows)
STARLING_RECORDABLE(starling_temper)
STARLING_RECORDABLE(starling_finish_logits)
