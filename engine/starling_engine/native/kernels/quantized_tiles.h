// Products of many rows with matrices in 2 to 8 bits by tiles, into which codes are unpacked once for up to kMaxRows rows.
#pragma once

#include "quantized.h"

#ifdef STARLING_TILES

namespace starling {

// Codes as bf16, by rows as they are.
struct Bf16OfCodes {
  QuantizedWeight w;
  const QuantizedTiles& tiles;

  ColumnTiles<char> lines(int64_t, int64_t) const { return {}; }
  ColumnTiles<bf16> operator()(int64_t block, int64_t here, int64_t step, int64_t steps, bf16* memory) const {
    const int64_t each = kTileDepth / w.columns.block, stride = steps * 512;
    for (int64_t b = 0; b < here; ++b) tiles.unpack_bf16(w, block + b, step * each, steps * each, memory + b * stride);
    return {memory, stride};
  }
};

// Codes as bytes, by rows in bytes. Sums of a group are whole numbers, and scaled and added as registers do it: what a row gets does
// not depend on how many others there are.
struct ByteTileProduct {
  QuantizedRows x;  // in blocks of kByteTileDepth columns, and tiles of 16 rows
  QuantizedWeight w;
  const QuantizedTiles& tiles;

  int64_t m() const { return x.m; }
  int64_t steps() const { return x.columns.blocks(); }
  ColumnTiles<char> lines(int64_t, int64_t) const { return {}; }
  ColumnTiles<int8_t> columns(int64_t block, int64_t here, int64_t step, int64_t steps, void* memory) const {
    const int64_t each = kByteTileDepth / w.columns.block;
    int8_t* out = static_cast<int8_t*>(memory);
    for (int64_t b = 0; b < here; ++b) tiles.unpack_bytes(w, block + b, step * each, steps * each, out + b * steps * kTileBytes);
    return {out, steps * kTileBytes};
  }

  // The sums of a group are scaled while the tiles multiply the next one.
  template <int ROWS, int BLOCKS>
  void run(int64_t tile, int64_t block, int64_t step, int64_t steps, ColumnTiles<int8_t> b, float* c, ptrdiff_t c_stride,
           Ahead ahead) const {
    alignas(64) int32_t sums[16 * ROWS][16 * BLOCKS];
    const int64_t depth = x.columns.span, first = step / depth, groups = steps / depth;
    for (int64_t g = 0; g < groups; ++g) {
      zero_sums<ROWS, BLOCKS>();
      const RowTile top = row_tile(tile, first + g), below = ROWS > 1 ? row_tile(tile + 1, first + g) : top;
      add_products<int8_t, ROWS, BLOCKS, true>(top, below, b.at + g * depth * kTileBytes, b.stride, depth, ahead);
      if (g > 0) add_scaled<ROWS, BLOCKS>(sums, tile, block, first + g - 1, c, c_stride);
      store_sums<ROWS, BLOCKS>(sums, sizeof sums[0]);
    }
    add_scaled<ROWS, BLOCKS>(sums, tile, block, first + groups - 1, c, c_stride);
  }

 private:
  int64_t rows_of(int64_t tile) const { return std::min<int64_t>(16, x.m - tile * 16); }

  // The last tile has fewer rows than 16 in memory. What is read in their place is multiplied, and left.
  RowTile row_tile(int64_t tile, int64_t group) const {
    const ptrdiff_t step = rows_of(tile) * kByteTileDepth;
    return {x.codes + tile * 16 * x.columns.k + group * x.columns.span * step, kByteTileDepth, step};
  }

  template <int ROWS, int BLOCKS>
  void add_scaled(const int32_t (&sums)[16 * ROWS][16 * BLOCKS], int64_t tile, int64_t block, int64_t group, float* c,
                  ptrdiff_t c_stride) const {
    if (w.minima != nullptr) return add_scaled<ROWS, BLOCKS, true>(sums, tile, block, group, c, c_stride);
    add_scaled<ROWS, BLOCKS, false>(sums, tile, block, group, c, c_stride);
  }

  template <int ROWS, int BLOCKS, bool MINIMA>
  void add_scaled(const int32_t (&sums)[16 * ROWS][16 * BLOCKS], int64_t tile, int64_t block, int64_t group, float* c,
                  ptrdiff_t c_stride) const {
    Reg scale[BLOCKS], minimum[BLOCKS];
    for (int j = 0; j < BLOCKS; ++j) {
      const int64_t at = ((block + j) * w.columns.scales() + group / w.columns.share) * kBlockCols;
      scale[j] = load_half(w.scales + at), minimum[j] = MINIMA ? load_half(w.minima + at) : splat(0.0f);
    }
    for (int t = 0; t < ROWS; ++t) {
      const int64_t rows = rows_of(tile + t), side = (tile + t) * 16 * x.columns.groups() + group * rows;
      const float *row_scales = x.scales + side, *row_sums = x.sums + side;
      const auto row = [&](int64_t i, bool first) {
        const Reg row_scale = splat(row_scales[i]);
#pragma GCC unroll 2
        for (int j = 0; j < BLOCKS; ++j) {
          float* to = c + (t * 16 + i) * c_stride + j * kBlockCols;
          const Reg sum = __builtin_convertvector(load_words(sums[t * 16 + i] + j * kBlockCols, kLanes), Reg);
          const Reg total = multiply_add(sum, scale[j] * row_scale, first ? splat(0.0f) : load(to));
          store(to, MINIMA ? multiply_add(minimum[j], splat(row_sums[i]), total) : total);
        }
      };
      if (group == 0) {
        for (int64_t i = 0; i < rows; ++i) row(i, true);
      } else {
        for (int64_t i = 0; i < rows; ++i) row(i, false);
      }
    }
  }
};

// The rows by some pairs of blocks, as run_pair does it.
template <typename Finish>
void multiply_bytes(const QuantizedRows& x, const QuantizedWeight& w, Span pairs, const Finish& finish) {
  for (int64_t row = 0; row < x.m; row += kMaxRows) {
    const ByteTileProduct product{x.at(row, std::min(kMaxRows, x.m - row)), w, w.tiles()};
    multiply_by_tiles(product, row, w.n, {pairs.begin * 2, std::min(pairs.end * 2, w.blocks())}, finish);
  }
}

// The same for m rows that stay as they are: row_of(i) is where row i is.
template <typename RowOf, typename Finish>
void multiply_bf16(int64_t m, const RowOf& row_of, const QuantizedWeight& w, Span pairs, const Finish& finish) {
  static thread_local Scratch scratch;
  const int64_t k = w.columns.k;
  for (int64_t row = 0; row < m; row += kMaxRows) {
    const int64_t here = std::min(kMaxRows, m - row);
    scratch.reset(Scratch::padded<bf16>(TiledRows::size(here, k)));
    const TiledRows rows{scratch.take<bf16>(TiledRows::size(here, k)), here, k};
    for (int64_t tile = 0; tile < rows.count(); ++tile) rows.copy(tile, [&](int64_t i) { return row_of(row + i); });
    const Bf16TileProduct<Bf16OfCodes> product{rows, {w, w.tiles()}};
    multiply_by_tiles(product, row, w.n, {pairs.begin * 2, std::min(pairs.end * 2, w.blocks())}, finish);
  }
}

}  // namespace starling

#endif
