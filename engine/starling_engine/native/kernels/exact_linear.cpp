// y = x W^T + b with W and b in fp32, for the few rows of a router: rounded to bf16, near ties would fall otherwise.
#include "gemm_tile.h"
#include "parallel.h"
#include "replay.h"

using namespace starling;

extern "C" {

// x [m, k] (rows x_stride elements apart), packed [ceil(n / 16), k, 16] 64-byte aligned, bias [n] or null -> out [m, n].
void starling_exact_linear(const bf16* x, int64_t x_stride, int64_t m, const float* packed, int64_t n, int64_t k,
                           const float* bias, float* out, int threads) {
  const int64_t blocks = ceil_div(n, kBlockCols), row_tiles = ceil_div(m, kTileRows), pieces = blocks * row_tiles;
  const int64_t stride = ceil_div(k, 16) * 16;  // whole lines, as the last one of a row is written whole
  in_parallel(threads_for(pieces, pieces * k * kBlockCols * sizeof(float), threads), [&](Part part) {
    const Span mine = part.of(pieces);
    Scratch& scratch = Scratch::mine();
    scratch.reset(Scratch::padded<float>(kTileRows * stride));
    float* rows = scratch.take<float>(kTileRows * stride);
    alignas(64) float sums[kTileRows * kBlockCols];
    for (int64_t piece = mine.begin; piece < mine.end; ++piece) {
      const int64_t block = piece / row_tiles, row = piece % row_tiles * kTileRows, col = block * kBlockCols;
      const int rows_here = static_cast<int>(std::min<int64_t>(kTileRows, m - row));
      for (int i = 0; i < rows_here; ++i) unpack(x + (row + i) * x_stride, k, rows + i * stride);
      const float* b = packed + block * k * kBlockCols;
      gemm_tile<float>({rows, stride, b, 0, k, sums, kBlockCols, false, b}, rows_here, 1, 0);
      const Lanes lanes = first_lanes(n - col);
      const Floats add = bias ? load16(bias + col, lanes) : splat16(0.0f);
      for (int i = 0; i < rows_here; ++i) store16(out + (row + i) * n + col, load16(sums + i * kBlockCols) + add, lanes);
    }
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_exact_linear)
