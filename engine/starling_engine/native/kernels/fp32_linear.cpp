// y = x W^T + b with all of them in fp32, for encoders.
#include "linear.h"

namespace starling {
namespace {

struct StoreFloats {
  const float* bias;  // [n], or null
  float* out;         // [rows][n]
  int64_t n;

  void operator()(const float* c, ptrdiff_t c_stride, int64_t row, int64_t rows_here, int64_t col, int64_t cols) const {
    for (int64_t j = 0; j < cols; j += 16) {
      const Lanes lanes = first_lanes(cols - j);
      const Floats add = bias ? load16(bias + col + j, lanes) : splat16(0.0f);
      for (int64_t i = 0; i < rows_here; ++i) store16(out + (row + i) * n + col + j, load16(c + i * c_stride + j) + add, lanes);
    }
  }
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// x [m, k] (rows x_stride elements apart), packed [ceil(n / 16), k, 16] 64-byte aligned, bias [n] or null -> out [m, n].
void starling_fp32_linear(const float* x, int64_t x_stride, int64_t m, const float* packed, int64_t n, int64_t k,
                          const float* bias, float* out, int threads) {
  const PackedProductOf<float> product{x, x_stride, packed, n, k};
  const StoreFloats store{bias, out, n};
  in_parallel(threads, [&](Part part) {
    const Span mine = part.of(ceil_div(n, kBlockCols));
    for (int64_t row = 0; row < m; row += kMaxRows) product.run_span(mine, row, std::min(kMaxRows, m - row), store);
  });
}

}  // extern "C"
