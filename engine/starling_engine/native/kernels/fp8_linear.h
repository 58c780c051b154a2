// The product of rows with a matrix in float8_e4m3fn, where groups of columns of a row share a scale. Numbers become bf16, which
// holds them exactly: in registers where one tile has all rows, else a piece at a time that stays in the first-level cache while all
// rows are multiplied by it.
//
// The matrix is packed as bf16 is (see gemm_tile.h): blocks of 16 rows, and of these two consecutive k of each row side by side,
// 32 bytes.
#pragma once

#include <algorithm>
#include <vector>

#include "fp8.h"
#include "linear.h"

namespace starling {
struct Fp8Product {
  const Bf16Operand* x;
  int64_t x_stride;
  const fp8_weight* packed;  // [ceil(n / 16)][k / 2][16][2]
  const float* scales;       // [ceil(n / 16)][groups][16]
  int64_t n, k, groups;

  // See PackedProduct.
  template <typename Finish>
  void run_span(Span blocks, int64_t row0, int64_t m, const Finish& finish) const {
    const int64_t row_tiles = ceil_div(m, kTileRows), row_step = ceil_div(m, row_tiles), tile = tile_blocks(row_step);
    const int64_t width = tile * kBlockCols;
    alignas(64) bf16 piece[kTileBlocks * kMostLines * kLine<bf16>];
    alignas(64) float sums[kTileRows * kTileBlocks * kBlockCols];
    // Sums of groups are scaled and added up here, where there are several.
    std::vector<float> totals(m * width);
    for (int64_t block = blocks.begin; block < blocks.end; block += tile) {
      const int here = static_cast<int>(std::min(tile, blocks.end - block));
      if (groups > 1) std::fill(totals.begin(), totals.end(), 0.0f);
      for (int64_t group = 0; group < groups; ++group) {
        const Tile at{row0, block, group, here, width};
        if (row_tiles == 1) {
          multiply(at, packed + line_of(block, group) * kLine<fp8_weight>, k / 2 * kLine<fp8_weight>, 0, m, 0, lines(), sums);
          groups > 1 ? add_scaled(at, sums, m, totals.data()) : scale(at, sums, m, totals.data());
          continue;
        }
        for (int64_t first = 0; first < lines(); first += kMostLines) {
          const int64_t count = std::min(kMostLines, lines() - first);
          for (int64_t j = 0; j < here; ++j)
            unpack(reinterpret_cast<const fp8*>(packed + (line_of(block + j, group) + first) * kLine<fp8_weight>),
                   count * kLine<fp8_weight>, piece + j * count * kLine<bf16>);
          for (int64_t row = 0; row < m; row += row_step) {
            const int64_t rows = std::min(row_step, m - row);
            float* to = totals.data() + row * width;
            if (groups == 1) {
              multiply(at, piece, count * kLine<bf16>, row, rows, first, count, to);
              if (first + count == lines()) scale(at, to, rows, to);
            } else {
              multiply(at, piece, count * kLine<bf16>, row, rows, first, count, sums);
              add_scaled(at, sums, rows, to);
            }
          }
        }
      }
      const int64_t col = block * kBlockCols, cols = std::min<int64_t>(here * kBlockCols, n - col);
      finish(totals.data(), width, row0, m, col, cols);
    }
  }

 private:
  // Lines of a group's columns that are bf16 at a time: with the rows of a tile, they stay in the first-level cache.
  static constexpr int64_t kMostLines = 64;

  struct Tile {
    int64_t row0, block, group;
    int here;
    int64_t width;
  };

  int64_t lines() const { return k / groups / 2; }
  int64_t line_of(int64_t block, int64_t group) const { return block * (k / 2) + group * lines(); }

  // Rows from `row` on times `count` lines of the group from `first` on, to `sums`; all but the first lines are added to it.
  template <typename T>
  void multiply(const Tile& at, const T* b, int64_t b_stride, int64_t row, int64_t rows, int64_t first, int64_t count,
                float* sums) const {
    const Bf16Operand* from = x + (at.row0 + row) * x_stride + (at.group * lines() + first) * 2;
    const bool more = groups == 1 && first > 0;
    gemm_tile<T>({from, x_stride, b, b_stride, count, sums, at.width, more, b}, static_cast<int>(rows), at.here, 0);
  }

  void add_scaled(const Tile& at, const float* sums, int64_t rows, float* totals) const {
    each_line(at, rows,
              [&](Floats by, int64_t i) { store16(totals + i, multiply_add(load16(sums + i), by, load16(totals + i))); });
  }
  void scale(const Tile& at, const float* sums, int64_t rows, float* totals) const {
    each_line(at, rows, [&](Floats by, int64_t i) { store16(totals + i, load16(sums + i) * by); });
  }

  template <typename Each>
  void each_line(const Tile& at, int64_t rows, const Each& each) const {
    for (int64_t j = 0; j < at.here; ++j) {
      const Floats by = load16(scales + ((at.block + j) * groups + at.group) * kBlockCols);
      for (int64_t i = 0; i < rows; ++i) each(by, i * at.width + j * kBlockCols);
    }
  }
};

}  // namespace starling
