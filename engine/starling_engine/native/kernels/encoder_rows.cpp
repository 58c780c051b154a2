// Row by row: layer normalisation with the residual added before it, and GELU.
#include <cmath>

#include "parallel.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

// Calls f(offset, lanes) for each 16 of [0, n); the last may be fewer.
template <typename F>
inline void each_16(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += 16) f(i, first_lanes(n - i));
}

// With a residual, residual += x is normalised, else (null) x.
template <typename T>
void layer_norm(const T* x, T* residual, const T* weight, const T* bias, float eps, T* out, int64_t tokens, int64_t k, int threads) {
  const float count = static_cast<float>(k);
  parallel_for(tokens, threads_for(tokens, tokens * k * sizeof(T), threads), [&](int64_t t) {
    const T* row = x + t * k;
    Floats total = splat16(0.0f);
    if (residual) {
      T* sum_row = residual + t * k;
      each_16(k, [&](int64_t i, Lanes lanes) {
        const Floats v = rounded<T>(load16(row + i, lanes) + load16(sum_row + i, lanes));
        store16(sum_row + i, v, lanes);
        total = total + v;
      });
      row = sum_row;
    } else {
      each_16(k, [&](int64_t i, Lanes lanes) { total = total + load16(row + i, lanes); });
    }
    const Floats mean = splat16(sum_of(total) / count);
    Floats squares = splat16(0.0f);
    each_16(k, [&](int64_t i, Lanes lanes) {
      const Floats off = choose(lanes, load16(row + i, lanes) - mean, splat16(0.0f));
      squares = multiply_add(off, off, squares);
    });
    const Floats by = splat16(1.0f / std::sqrt(sum_of(squares) / count + eps));
    each_16(k, [&](int64_t i, Lanes lanes) {
      const Floats unit = (load16(row + i, lanes) - mean) * by, add = bias ? load16(bias + i, lanes) : splat16(0.0f);
      store16(out + t * k + i, multiply_add(unit, load16(weight + i, lanes), add), lanes);
    });
  });
}

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

template <typename T>
void gelu_rows(const T* x, T* out, int64_t tokens, int64_t width, int threads) {
  parallel_for(tokens, threads_for(tokens, tokens * width * 2 * sizeof(T), threads), [&](int64_t t) {
    each_16(width, [&](int64_t i, Lanes lanes) { store16(out + t * width + i, gelu(load16(x + t * width + i, lanes)), lanes); });
  });
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// x [tokens, k] -> out, which may be x. With a residual: residual += x, and that is normalised. `bias` may be null.
void starling_layer_norm(const void* x, void* residual, const void* weight, const void* bias, float eps, void* out, int64_t tokens,
                         int64_t k, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    layer_norm(static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight), static_cast<const T*>(bias), eps,
               static_cast<T*>(out), tokens, k, threads);
  };
  fp32 ? run(float{}) : run(bf16{});
}

// x [tokens, width] -> out, which may be x.
void starling_gelu(const void* x, void* out, int64_t tokens, int64_t width, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    gelu_rows(static_cast<const T*>(x), static_cast<T*>(out), tokens, width, threads);
  };
  fp32 ? run(float{}) : run(bf16{});
}

}  // extern "C"

STARLING_RECORDABLE(starling_layer_norm)
STARLING_RECORDABLE(starling_gelu)
