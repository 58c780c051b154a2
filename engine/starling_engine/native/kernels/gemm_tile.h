// The one matrix micro-kernel: a tile of at most 8 rows by 3 column blocks of 16, accumulated in fp32 registers.
//
// B is cut in column blocks of 16, each a run of 64-byte lines. A line of bf16 holds two consecutive k of 16 columns
// ([K/2][16][2], the VNNI packing, which vdpbf16ps takes); a line of fp32 holds one k ([K][16]). Either way a
// step takes one line of each block and one broadcast 32-bit word of each row of A. 8 x 3 accumulators leave room
// for the lines and the word in the 32 registers, and hide the instruction's latency.
#pragma once

#include "simd.h"

namespace starling {

constexpr int kTileRows = 8;
constexpr int kTileBlocks = 3;
constexpr int kBlockCols = 16;

// Number of consecutive k of one column in a line.
template <typename T>
constexpr int64_t kDepth = 4 / sizeof(T);

template <typename T>
struct GemmTile {
  const T* a;  // [rows][lines * kDepth], rows a_stride elements apart
  ptrdiff_t a_stride;
  const T* b;  // column block j at b + j * b_stride
  ptrdiff_t b_stride;
  int64_t lines;
  float* c;  // [rows][blocks * 16], rows c_stride elements apart
  ptrdiff_t c_stride;
  bool accumulate;    // add to c, rather than overwrite it
  const T* prefetch;  // memory to prefetch along the way, laid out as b
};

// blocks_ahead: blocks of `prefetch` to fetch, at most as many as the tile has.
template <typename T>
void gemm_tile(const GemmTile<T>& tile, int rows, int blocks, int blocks_ahead);

}  // namespace starling
