// The one matrix micro-kernel: a tile of a few rows by a few column blocks of 16, accumulated in fp32 registers.
//
// B is cut in column blocks of 16, each a run of 64-byte lines. A line of bf16 holds two consecutive k of 16 columns
// ([K/2][16][2], the VNNI packing, which instructions for pairs take); a line of fp32 holds one k ([K][16]). A step takes one line
// of each block, and one number (or pair) of each row of A. Where there are no instructions for pairs, the two k of a line are
// widened to fp32 and multiplied one after the other; A is fp32 then.
#pragma once

#include "simd.h"

namespace starling {

// The sums of a whole tile, the lines and the number fit in the registers, and are enough to hide the instruction's latency.
constexpr int kTileRows = kLanes == 16 ? 8 : 5;
constexpr int kTileBlocks = 3;
// Rows of a tile by lines of T. With AVX2 there is room for one more where lines need not be widened.
template <typename T>
constexpr int kTileRowsOf = kTileRows;
template <>
constexpr int kTileRowsOf<float> = kLanes == 8 ? 6 : kTileRows;
constexpr int kBlockCols = 16;
// Column blocks that a tile of so many rows may have.
constexpr int64_t tile_blocks(int64_t rows) { return kLanes == 16 || rows == 1 ? kTileBlocks : rows == 2 ? 2 : 1; }

// Number of consecutive k of one column in a line.
template <typename T>
constexpr int64_t kDepth = 4 / sizeof(T);

// fp8 of a weight. Its lines are half as long: 32 bytes, which hold two consecutive k as a line of bf16 does.
struct fp8_weight {
  uint8_t bits;
};
template <>
constexpr int64_t kLine<fp8_weight> = 32;
template <>
constexpr int64_t kDepth<fp8_weight> = 2;
template <>
struct OperandOf<fp8_weight> {
  typedef Bf16Operand Type;
};

template <typename T>
struct GemmTile {
  const Operand<T>* a;  // [rows][lines * kDepth], rows a_stride elements apart
  ptrdiff_t a_stride;
  const T* b;  // column block j at b + j * b_stride
  ptrdiff_t b_stride;
  int64_t lines;
  float* c;  // [rows][blocks * 16], rows c_stride elements apart
  ptrdiff_t c_stride;
  bool accumulate;    // add to c, rather than overwrite it
  const T* prefetch;  // memory to prefetch along the way, laid out as b
  const float* scales = nullptr;  // of the columns of block j at scales + j * scales_stride; null: all are 1
  ptrdiff_t scales_stride = 0;
  bf16* unpacked = nullptr;  // takes lines of fp8 as bf16, column block j at unpacked + j * unpacked_stride; null: nothing does
  ptrdiff_t unpacked_stride = 0;
};

// blocks_ahead: blocks of `prefetch` to fetch, at most as many as the tile has.
template <typename T>
void gemm_tile(const GemmTile<T>& tile, int rows, int blocks, int blocks_ahead);

#ifdef STARLING_MATRICES
// The same for many rows where two rows by two columns are one instruction: of up to kMatrixRows rows by one block, in whose lines two
// columns have 4 k each in a register, as `pack_matrices` copies them from lines of bf16. The sums are those of gemm_tile, to the bit.
constexpr int kMatrixRows = 6;
struct MatrixTile {
  const bf16* a;  // [rows][4 steps]
  ptrdiff_t a_stride;
  const bf16* b;  // [steps][16][4]
  int64_t steps;
  float* c;  // [rows][16]
  ptrdiff_t c_stride;
  bool accumulate;
};
void multiply_matrices(const MatrixTile& tile, int rows);
void pack_matrices(const bf16* lines, int64_t steps, bf16* out);
#endif

}  // namespace starling
