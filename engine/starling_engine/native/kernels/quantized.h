// Products with matrices in 2 to 8 bits: rows of x in 8 bits, the weight, and the loop over both. How codes lie, and what multiplies
// them, is in quantized_linear.cpp.
#pragma once

#include <cmath>
#include <limits>

#include "linear.h"

namespace starling {

constexpr float kNothing = 1e-30f;
constexpr int kQuantizedRows = kLanes == 16 ? 8 : 4;
// Rows from which on codes are unpacked once for all of them, of layouts where that is worth it.
constexpr int64_t kUnpackRows = 32;

// How columns are cut: a block has as many as a line of codes is made for, some blocks of x are rounded by one scale (a group), and
// some groups of a row of the weight share a scale.
struct Columns {
  int64_t k, block, span, share;

  int64_t blocks() const { return k / block; }
  int64_t groups() const { return k / (block * span); }
  int64_t scales() const { return groups() / share; }
  // The same groups in other blocks.
  Columns with_block(int64_t size) const { return {k, size, block * span / size, share}; }
};

// What multiplies so many rows.
enum class By { kRegisters, kByteTiles, kBf16Tiles };
#ifdef STARLING_TILES
// Sums of bytes leave their tiles at the end of each group of x, to be scaled: that takes registers about as long as tiles take to
// multiply 128 columns, meanwhile. A group of 32 fills half a tile, whose product takes as long as that of 32 columns of bf16, and
// would be scaled on top. So codes with small groups become bf16, and rows of x stay as they are.
inline By multiplied_by(const Columns& columns, int64_t rows) {
  const bool bytes = columns.block * columns.span % (2 * kByteTileDepth) == 0;
  if (!by_tiles(rows, columns.k, bytes ? kFewRowsOfBytes : kFewRowsOfCodes)) return By::kRegisters;
  return bytes ? By::kByteTiles : By::kBf16Tiles;
}
#else
constexpr By multiplied_by(const Columns&, int64_t) { return By::kRegisters; }
#endif

// Rows of x in 8 bits, in tiles of `step` rows: the blocks of all rows of a tile lie side by side, so that a tile's loop has one
// address. A product with unsigned codes is too large by `zero` times the sum of the row's group, so that is taken from it.
struct QuantizedRows {
  int8_t* codes;    // [tiles][blocks][rows of the tile][columns of a block]
  float* scales;    // [tiles][groups][rows of the tile]
  int32_t* begins;  // the same
  float* sums;      // the same: of the values
  Columns columns;
  int64_t m, step;

  static size_t bytes(int64_t m, const Columns& columns) {
    return Scratch::padded<int8_t>(room(m, columns)) + 3 * Scratch::padded<float>(m * columns.groups());
  }
  // Memory for m rows, of which `part` makes rows.
  static QuantizedRows in(Scratch& scratch, int64_t m, const Columns& columns) {
    const int64_t n = m * columns.groups();
    int8_t* codes = scratch.take<int8_t>(room(m, columns));
    return {codes, scratch.take<float>(n), scratch.take<int32_t>(n), scratch.take<float>(n), columns, m, 1};
  }

  // Rows [from, from + rows) of the memory, as rows of their own, in the form in which so many are multiplied.
  QuantizedRows part(int64_t from, int64_t rows) const {
    QuantizedRows found = at(from, rows);
    found.step = rows == 0 ? 1 : ceil_div(rows, ceil_div(rows, kQuantizedRows));
#ifdef STARLING_TILES
    if (multiplied_by(columns, rows) == By::kByteTiles) found.columns = columns.with_block(kByteTileDepth), found.step = 16;
#endif
    return found;
  }

  // The same, in this form; `from` is a multiple of `step`.
  QuantizedRows at(int64_t from, int64_t rows) const {
    const int64_t n = from * columns.groups();
    return {codes + from * columns.k, scales + n, begins + n, sums + n, columns, rows, step};
  }

  // Fetches all of them at once, where another thread has made them. The first block would wait for each line.
  void fetch_all() const {
    const char* end = reinterpret_cast<const char*>(sums + m * columns.groups());
    for (const char* line = reinterpret_cast<const char*>(codes); line < end; line += 64) fetch(line);
  }

  void quantize(int64_t row, const bf16* x, int32_t zero) const {
    const int64_t first = row / step * step, rows = std::min(step, m - first), size = columns.block * columns.span;
    int8_t* out = codes + first * columns.k + (row - first) * columns.block;
    for (int64_t g = 0; g < columns.groups(); ++g, x += size) {
      const Floats none = splat16(0.0f);
      Floats largest = none, total = none;
      for (int64_t j = 0; j < size; j += 16) {
        const Floats v = load16(x + j);
        largest = highest(largest, highest(v, none - v));
      }
      const float top = highest_of(largest);
      // Rows of less than kNothing are zeros: 127 / top would not be finite.
      const float scale = top / 127.0f, by = top > kNothing ? 127.0f / top : 0.0f;
      for (int64_t j = 0; j < size; j += columns.block, out += rows * columns.block)
        for (int64_t i = 0; i < columns.block; i += 16) total = total + store_codes(out + i, load16(x + j + i) * splat16(by));
      // A row with what is not a number, or infinite, has sums that show it.
      const float sum = sum_of(total);
      const bool broken = sum != sum;
      const int64_t at = first * columns.groups() + g * rows + row - first;
      scales[at] = broken ? sum : scale;
      begins[at] = broken ? 0 : -zero * static_cast<int32_t>(sum);
      sums[at] = scales[at] * sum;
    }
  }

 private:
  // What tiles read past the last row is in the memory, too.
  static size_t room(int64_t m, const Columns& columns) { return m * columns.k + 1024; }

  // Rounds 16 numbers within +-127, and returns them.
  static Floats store_codes(int8_t* out, Floats v) {
    typedef int8_t Codes __attribute__((vector_size(kLanes)));
    return by_part([&](int i) {
      const Reg whole = nearest_whole(v.part[i]);
      const Codes codes = __builtin_convertvector(__builtin_convertvector(whole, IReg), Codes);
      std::memcpy(out + i * kLanes, &codes, kLanes);
      return whole;
    });
  }
};

struct QuantizedWeight;
// c[rows][16] of some rows, from `row` on, and one block of the weight, whose codes are at `codes`.
using RunTile = void (*)(const QuantizedRows&, int64_t row, const QuantizedWeight&, int64_t block, const uint8_t* codes, float* c,
                         ptrdiff_t c_stride);

// The kernels of a layout of codes.
struct QuantizedTiles {
  const RunTile* run;           // for 1 to kQuantizedRows rows
  const RunTile* run_unpacked;  // the same, by unpacked codes
  void (*unpack)(const QuantizedWeight&, const uint8_t* codes, uint8_t* out);  // of a block: one a byte; null: not worth it
#ifdef STARLING_TILES
  // `count` blocks of columns of a block, from `first` on, as tiles: numbers with a sign, and scaled ones rounded to the nearest.
  void (*unpack_bytes)(const QuantizedWeight&, int64_t block, int64_t first, int64_t count, int8_t* out);
  void (*unpack_bf16)(const QuantizedWeight&, int64_t block, int64_t first, int64_t count, bf16* out);
#endif
};

struct QuantizedWeight {
  const uint8_t* codes;    // [ceil(n / 16)][blocks of columns][bytes of one, of 16 rows]
  const uint16_t* scales;  // [ceil(n / 16)][scales of a row][16] fp16
  const uint16_t* minima;  // the same, or null
  const uint8_t* table;    // [16]: what codes of 4 bits stand for, or null
  int64_t n;
  Columns columns;
  int bits, zero;  // zero: the code of 0, or what stands for it in the table

  int64_t blocks() const { return ceil_div(n, kBlockCols); }
  int64_t pairs() const { return ceil_div(blocks(), 2); }
  int64_t bytes() const { return blocks() * kBlockCols * columns.k * bits / 8; }

  // The weight `index` of several alike, one behind the other.
  QuantizedWeight of(int64_t index) const {
    QuantizedWeight one = *this;
    const int64_t scales_each = blocks() * columns.scales() * kBlockCols;
    one.codes += index * bytes();
    one.scales += index * scales_each;
    if (minima != nullptr) one.minima += index * scales_each;
    return one;
  }

  // What a sum of products with a row begins with, for each 1 that the row's codes add up to.
  int32_t begin() const;
  const QuantizedTiles& tiles() const;  // a constant
};

// Two blocks, which make 16 columns of a gated layer together, with all rows: they stay in the second-level cache.
template <typename Finish>
void run_pair(const QuantizedRows& x, const QuantizedWeight& w, const QuantizedTiles& tiles, int64_t pair, const Finish& finish) {
  alignas(64) float sums[kQuantizedRows][2 * kBlockCols];
  const int64_t here = std::min<int64_t>(2, w.blocks() - pair * 2), col = pair * 2 * kBlockCols;
  const int64_t numbers = w.columns.k * kBlockCols, packed = numbers * w.bits / 8;
  const bool unpacks = x.m >= kUnpackRows && tiles.unpack != nullptr;
  const uint8_t* codes = w.codes + pair * 2 * packed;
  if (unpacks) {
    static thread_local Scratch scratch;
    scratch.reset(2 * numbers);
    uint8_t* memory = scratch.take<uint8_t>(2 * numbers);
    for (int64_t b = 0; b < here; ++b) tiles.unpack(w, codes + b * packed, memory + b * numbers);
    codes = memory;
  }
  const RunTile* run = unpacks ? tiles.run_unpacked : tiles.run;
  const int64_t each = unpacks ? numbers : packed;
  for (int64_t row = 0; row < x.m; row += x.step) {
    const int64_t rows = std::min(x.step, x.m - row);
    for (int64_t b = 0; b < here; ++b)
      run[rows - 1](x, row, w, pair * 2 + b, codes + b * each, sums[0] + b * kBlockCols, 2 * kBlockCols);
    finish(sums[0], 2 * kBlockCols, row, rows, col, std::min(here * kBlockCols, w.n - col));
  }
}

}  // namespace starling
