// Row by row: layer normalisation, with the residual added before it.
#include <cmath>

#include "parallel.h"
#include "replay.h"
#include "simd.h"

namespace starling {
namespace {

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

}  // extern "C"

STARLING_RECORDABLE(starling_layer_norm)
