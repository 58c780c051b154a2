// The product of rows with a matrix in float8_e4m3fn, where groups of columns of a row share a scale. Numbers become bf16, which
// holds them exactly, in the registers of the tile of the first rows. It also writes them for all other rows, a panel at a time,
// which stays in the second-level cache while these are multiplied by it.
//
// The matrix is packed as bf16 is (see gemm_tile.h): blocks of 16 rows, and of these two consecutive k of each row side by side,
// 32 bytes.
#pragma once

#include <algorithm>

#include "fp8.h"
#include "linear.h"

namespace starling {

#ifdef STARLING_TILES
// Numbers times their scales, rounded to bf16.
struct TilesOfFp8 {
  const fp8_weight* packed;
  const float* scales;
  int64_t k, groups;

  ColumnTiles<char> lines(int64_t, int64_t) const { return {}; }
  ColumnTiles<bf16> operator()(int64_t block, int64_t here, int64_t step, int64_t steps, bf16* memory) const {
    const int64_t first = step * kTileDepth / 2, end = first + steps * kTileDepth / 2, size = k / groups / 2;
    bf16* out = memory;
    for (int64_t b = block; b < block + here; ++b) {
      const fp8_weight* line = packed + (b * k / 2 + first) * kLine<fp8_weight>;
      for (int64_t i = first; i < end; ++i, line += kLine<fp8_weight>, out += kLine<bf16>) {
        const Reg scale = load(scales + (b * groups + i / size) * kBlockCols);
        const IReg pairs = bf16_pairs(reinterpret_cast<const fp8*>(line));
        store_words(out, pairs_of((Reg)(pairs << 16) * scale, (Reg)(pairs & ~0xFFFF) * scale));
      }
    }
    return {memory, steps * 512};
  }
};
#endif

struct Fp8Product {
  const Bf16Operand* x;
  int64_t x_stride;
  const fp8_weight* packed;  // [ceil(n / 16)][k / 2][16][2]
  const float* scales;       // [ceil(n / 16)][groups][16]
  int64_t n, k, groups;

#ifdef STARLING_TILES
  TilesOfFp8 tiles() const { return {packed, scales, k, groups}; }
#endif

  // See PackedProduct.
  template <typename Finish>
  void run_span(Span blocks, int64_t row0, int64_t m, const Finish& finish) const {
#ifdef STARLING_TILES
    if (by_tiles(m, k)) return multiply_rows_by_tiles(x + row0 * x_stride, x_stride, m, n, k, tiles(), row0, blocks, finish);
#endif
    const int64_t row_tiles = ceil_div(m, kTileRows), row_step = ceil_div(m, row_tiles), tile = tile_blocks(row_step);
    const int64_t lines = k / 2, group_lines = lines / groups, chunks = ceil_div(lines, kMaxLines), step = ceil_div(lines, chunks);
    const int64_t tiles_in_panel = row_tiles == 1 ? 1 : std::max<int64_t>(1, kPanelBytes / (step * 64 * tile));
    const int64_t panel_blocks = tiles_in_panel * tile, width = panel_blocks * kBlockCols, stride = step * kLine<bf16>;
    const size_t sums_room = (chunks > 1 ? m : kTileRows) * width, unpacked_room = row_tiles > 1 ? panel_blocks * stride : 0;
    static thread_local Scratch scratch;
    scratch.reset(Scratch::padded<float>(sums_room) + Scratch::padded<bf16>(unpacked_room));
    float* sums = scratch.take<float>(sums_room);
    bf16* unpacked = scratch.take<bf16>(unpacked_room);
    for (int64_t panel = blocks.begin; panel < blocks.end; panel += panel_blocks) {
      const int64_t panel_end = std::min(panel + panel_blocks, blocks.end);
      for (int64_t first = 0; first < lines; first += step) {
        const int64_t end = std::min(first + step, lines);
        for (int64_t row = 0; row < m; row += row_step) {
          const int rows_here = static_cast<int>(std::min(row_step, m - row));
          for (int64_t block = panel; block < panel_end; block += tile) {
            const int blocks_here = static_cast<int>(std::min(tile, panel_end - block));
            float* c = sums + (chunks > 1 ? row * width : 0) + (block - panel) * kBlockCols;
            for (int64_t line = first, count; line < end; line += count) {
              const int64_t group = line / group_lines;
              count = std::min(end, (group + 1) * group_lines) - line;
              const Bf16Operand* a = x + (row0 + row) * x_stride + line * 2;
              const float* by = scales + (block * groups + group) * kBlockCols;
              bf16* piece = unpacked + (block - panel) * stride + (line - first) * kLine<bf16>;
              if (row == 0) {
                const fp8_weight* b = packed + (block * lines + line) * kLine<fp8_weight>;
                gemm_tile<fp8_weight>({a, x_stride, b, lines * kLine<fp8_weight>, count, c, width, line > 0, b, by,
                                       groups * kBlockCols, row_tiles > 1 ? piece : nullptr, stride},
                                      rows_here, blocks_here, 0);
              } else {
                gemm_tile<bf16>({a, x_stride, piece, stride, count, c, width, line > 0, piece, by, groups * kBlockCols}, rows_here,
                                blocks_here, 0);
              }
            }
            const int64_t col = block * kBlockCols, cols = std::min<int64_t>(blocks_here * kBlockCols, n - col);
            if (end == lines) finish(c, width, row0 + row, rows_here, col, cols);
          }
        }
      }
    }
  }
};

}  // namespace starling
