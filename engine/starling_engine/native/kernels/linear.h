// The product of rows with a packed matrix that the linear layers and the experts share, for the columns of one thread.
// A gated matrix is two, gate then up, and y = silu(gate) * up, half as wide. Each block of 16 columns then holds 8 of the gate
// and the same 8 of up, so that both sums are ready at once.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "gemm_tile.h"
#include "parallel.h"
#include "tiles.h"

namespace starling {

// A panel of B and the next one, which is prefetched, share the 1 MB second-level cache with the rows of x.
constexpr int64_t kPanelBytes = 384 * 1024;
// Lines of fp32 hold half as many columns, so that a panel of as many bytes would be used half as long. On EPYC 7003 (512 KB) 192 KB are
// the fastest.
template <typename T>
constexpr int64_t kPanelBytesOf = kPanelBytes;
template <>
constexpr int64_t kPanelBytesOf<float> = kPanelBytes / 2;
constexpr int64_t kMaxLines = 2048;
constexpr int64_t kMaxRows = 512;
// Up to this many rows, lines are used as fast as they come, and the hardware's own prefetching is better.
constexpr int64_t kHardwareRows = 2;

// Rows from which on lines are copied for products of matrices.
constexpr int64_t kRowsOfMatrices = 32;

// The row of a matrix [n, k] that is row i of a packed block; it may lie past the last one.
inline int64_t packed_row(int64_t block, int64_t i, int64_t n, bool gated) {
  return gated ? block * 8 + i % 8 + (i < 8 ? 0 : n / 2) : block * kBlockCols + i;
}

// Rows of bf16 in the type in which they are multiplied.
struct OperandRows {
  const Bf16Operand* rows;
  int64_t stride;

  // Elements that the memory for `m` rows of `k` has to have.
  static int64_t room(int64_t m, int64_t k) { return kPairs ? 0 : m * copied_stride(k); }

  // The rows themselves where bf16 is multiplied, else copies in `memory`, which so many threads make.
  static OperandRows of(const bf16* x, int64_t x_stride, int64_t m, int64_t k, Bf16Operand* memory, int threads = 1) {
    if (kPairs) return {reinterpret_cast<const Bf16Operand*>(x), x_stride};
    const int64_t stride = copied_stride(k);
    parallel_for(m, threads_for(m, m * k * sizeof(bf16), threads),
                 [&](int64_t i) { unpack(x + i * x_stride, k, memory + i * stride); });
    return {memory, stride};
  }

 private:
  // Whole lines, as the last one of a row is written whole.
  static int64_t copied_stride(int64_t k) { return ceil_div(k, 16) * 16; }
};

#ifdef STARLING_TILES
// A packed matrix is tiles as it is.
struct TilesOf {
  const bf16* packed;
  int64_t k;
  ColumnTiles<bf16> operator()(int64_t block, int64_t, int64_t step, int64_t, bf16*) const {
    return {packed + block * k * kBlockCols + step * 512, k * kBlockCols};
  }
  ColumnTiles<char> lines(int64_t block, int64_t step) const {
    return {reinterpret_cast<const char*>(packed + block * k * kBlockCols + step * 512), k * kTileDepth};
  }
};
#endif

// Of a matrix of T, bf16 or fp32.
template <typename T>
struct PackedProductOf {
  const Operand<T>* x;
  int64_t x_stride;
  const T* packed;
  int64_t n, k;

  // Rows [row0, row0 + m), at most kMaxRows, by the column blocks of one thread. `finish(c, c_stride, row, rows, col, cols)` takes
  // the sums of `rows` x `cols` at (row, col), as soon as they are there.
  template <typename Finish>
  void run_span(Span blocks, int64_t row0, int64_t m, const Finish& finish) const {
#ifdef STARLING_TILES
    if constexpr (std::is_same_v<T, bf16>)
      if (by_tiles(m, k))
        return multiply_rows_by_tiles(x + row0 * x_stride, x_stride, m, n, k, TilesOf{packed, k}, row0, blocks, finish);
#endif
#ifdef STARLING_MATRICES
    if constexpr (std::is_same_v<T, bf16>) if (m >= kRowsOfMatrices && k % 4 == 0) return run_matrices(blocks, row0, m, finish);
#endif
    const int64_t lines = k / kDepth<T>, block_size = k * kBlockCols;
    const int64_t k_chunks = ceil_div(lines, kMaxLines), k_step = ceil_div(lines, k_chunks);
    const int64_t row_tiles = ceil_div(m, kTileRowsOf<T>), row_step = ceil_div(m, row_tiles), tile = tile_blocks(row_step);
    const int64_t tiles_in_panel = row_tiles == 1 ? 1 : std::max<int64_t>(1, kPanelBytesOf<T> / (k_step * 64 * tile));
    const int64_t panel_blocks = tiles_in_panel * tile, width = panel_blocks * kBlockCols;
    // The sums of a panel wait in `sums` when K is cut in chunks; else each tile is finished at once.
    const bool chunked = k_chunks > 1;
    alignas(64) float tile_sums[kTileRowsOf<T> * kTileBlocks * kBlockCols];
    std::vector<float> panel_sums(chunked ? m * width : 0);

    for (int64_t panel = blocks.begin; panel < blocks.end; panel += panel_blocks) {
      const int64_t panel_end = std::min(panel + panel_blocks, blocks.end);
      for (int64_t chunk = 0; chunk < k_chunks; ++chunk) {
        const int64_t k0 = chunk * k_step, k_here = std::min(k_step, lines - k0);
        const bool last = chunk + 1 == k_chunks;
        // Offset of the next chunk of this panel, or of the next panel's first.
        const ptrdiff_t next = last ? panel_blocks * block_size - k0 * kLine<T> : k_step * kLine<T>;
        const bool fetch = m > kHardwareRows && (!last || panel + panel_blocks < blocks.end);
        for (int64_t row = 0, r = 0; row < m; row += row_step, ++r) {
          const int rows_here = static_cast<int>(std::min(row_step, m - row));
          for (int64_t block = panel; block < panel_end; block += tile) {
            const int blocks_here = static_cast<int>(std::min(tile, panel_end - block));
            const T* b = packed + block * block_size + k0 * kLine<T>;
            // The row tiles share the prefetching of the next panel, about a block each.
            const int64_t ahead = fetch ? blocks_here * r / row_tiles : 0;
            const int64_t ahead_end = fetch ? blocks_here * (r + 1) / row_tiles : 0;
            const int64_t col = block * kBlockCols, cols = std::min<int64_t>(blocks_here * kBlockCols, n - col);
            float* c = chunked ? panel_sums.data() + row * width + (block - panel) * kBlockCols : tile_sums;
            const ptrdiff_t c_stride = chunked ? width : kTileBlocks * kBlockCols;
            gemm_tile<T>({x + (row0 + row) * x_stride + k0 * kDepth<T>, x_stride, b, block_size, k_here, c, c_stride, chunk > 0,
                          b + next + ahead * block_size},
                         rows_here, blocks_here, static_cast<int>(ahead_end - ahead));
            if (last) finish(c, c_stride, row0 + row, rows_here, col, cols);
          }
        }
      }
    }
  }

#ifdef STARLING_MATRICES
  // The same for many rows: a panel's lines are copied for them first.
  template <typename Finish>
  void run_matrices(Span blocks, int64_t row0, int64_t m, const Finish& finish) const {
    const int64_t lines = k / 2, step = std::min(lines, kMaxLines), block_size = k * kBlockCols, copied = step * kLine<bf16>;
    const int64_t panel_blocks = std::max<int64_t>(1, kPanelBytes / (step * 64)), width = panel_blocks * kBlockCols;
    const bool chunked = step < lines;
    const size_t sums_size = (chunked ? m : kMatrixRows) * width;
    static thread_local Scratch scratch;
    scratch.reset(Scratch::padded<bf16>(panel_blocks * copied) + Scratch::padded<float>(sums_size));
    bf16* matrices = scratch.take<bf16>(panel_blocks * copied);
    float* sums = scratch.take<float>(sums_size);
    for (int64_t panel = blocks.begin; panel < blocks.end; panel += panel_blocks) {
      const int64_t here = std::min(panel_blocks, blocks.end - panel), col = panel * kBlockCols;
      for (int64_t line = 0; line < lines; line += step) {
        const int64_t steps = std::min(step, lines - line) / 2;
        for (int64_t j = 0; j < here; ++j)
          pack_matrices(packed + (panel + j) * block_size + line * kLine<bf16>, steps, matrices + j * copied);
        for (int64_t row = 0; row < m; row += kMatrixRows) {
          const int64_t rows_here = std::min<int64_t>(kMatrixRows, m - row);
          const bf16* a = x + (row0 + row) * x_stride + line * 2;
          float* c = sums + (chunked ? row * width : 0);
          for (int64_t j = 0; j < here; ++j)
            multiply_matrices({a, x_stride, matrices + j * copied, steps, c + j * kBlockCols, width, line > 0},
                              static_cast<int>(rows_here));
          if (line + step >= lines) finish(c, width, row0 + row, rows_here, col, std::min(here * kBlockCols, n - col));
        }
      }
    }
  }
#endif
};
typedef PackedProductOf<bf16> PackedProduct;

// What a gated matrix gives of the products of gate and up: silu(gate) * up; with a limit the clamped form of experts of gpt-oss and
// DeepSeek-V4 (`ClampedSwiglu`); with one below 0 the GELU of Gemma 4's (`TanhGelu`).
struct Gate {
  float alpha = 0, limit = 0, offset = 0;

  Floats operator()(Floats gate, Floats up) const {
    if (limit == 0) return silu(gate) * up;
    if (limit < 0) return tanh_gelu(gate) * up;
    const Floats one = splat16(1.0f), top = splat16(limit);
    gate = lowest(top, gate);
    up = highest(splat16(-limit), lowest(top, up));
    return (up + splat16(offset)) * gate / (one + exp(gate * splat16(-alpha)));
  }
};

// Receives the sums of a plain or gated linear layer: adds the bias, applies the gates, stores in the output's type.
template <typename Out>
struct StoreSums {
  const bf16* bias;  // [n], or null
  int64_t n;
  bool gated;
  Out* out;  // [rows][n], or gated [rows][n / 2]; rows are out_stride apart
  int64_t out_stride;
  Gate gate = {};

  const char* line_of(int64_t row, int64_t col) const {
    return reinterpret_cast<const char*>(out + row * out_stride + (gated ? col / 2 : col));
  }
  ptrdiff_t line() const { return out_stride * sizeof(Out); }

  void operator()(const float* c, ptrdiff_t c_stride, int64_t row, int64_t rows_here, int64_t col, int64_t cols) const {
    if (gated) return store_gated(c, c_stride, row, rows_here, col, cols);
    int64_t j = 0;
    for (; j + 32 <= cols; j += 32) {
      const bf16* add = bias ? bias + col + j : nullptr;
      const Floats first = add ? load16(add) : splat16(0.0f), second = add ? load16(add + 16) : splat16(0.0f);
      for (int64_t i = 0; i < rows_here; ++i) {
        const float* sums = c + i * c_stride + j;
        store32(out + (row + i) * out_stride + col + j, load16(sums) + first, load16(sums + 16) + second);
      }
    }
    for (; j < cols; j += 16) {
      const Lanes lanes = first_lanes(cols - j);
      const Floats add = bias ? load16(bias + col + j, lanes) : splat16(0.0f);
      for (int64_t i = 0; i < rows_here; ++i)
        store16(out + (row + i) * out_stride + col + j, load16(c + i * c_stride + j) + add, lanes);
    }
  }

  // Two blocks at a time, which make 16 columns of the output; n is a multiple of 16.
  void store_gated(const float* c, ptrdiff_t c_stride, int64_t row, int64_t rows_here, int64_t col, int64_t cols) const {
    for (int64_t j = 0; j < cols; j += 32) {
      const bool both = j + 16 < cols;
      const Lanes lanes = first_lanes(both ? 16 : 8);
      const int64_t at = (col + j) / 2;
      const Floats none = splat16(0.0f);
      const Floats add_gate = bias ? load16(bias + at, lanes) : none, add_up = bias ? load16(bias + n / 2 + at, lanes) : none;
      for (int64_t i = 0; i < rows_here; ++i) {
        const float* sums = c + i * c_stride + j;
        const Floats first = load16(sums), second = both ? load16(sums + 16) : none;
        const Floats opened = low_halves(first, second) + add_gate, up = high_halves(first, second) + add_up;
        store16(out + (row + i) * out_stride + at, gate(opened, up), lanes);
      }
    }
  }
};

}  // namespace starling
