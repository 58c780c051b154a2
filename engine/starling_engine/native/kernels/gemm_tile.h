// The one bf16 matrix micro-kernel: a tile of at most 8 rows by 3 column blocks of 16, accumulated in registers.
//
// B is in the VNNI packing: column blocks of 16, each [K/2][16][2], so that one 64-byte line holds two
// consecutive k of 16 columns, which is what vdpbf16ps eats. 8 x 3 accumulators leave room for the three lines of
// B and one broadcast pair of A in the 32 registers, and hide the instruction's latency.
#pragma once

#include "simd.h"

namespace starling {

constexpr int kTileRows = 8;
constexpr int kTileBlocks = 3;
constexpr int kBlockCols = 16;

struct GemmTile {
  const bf16* a;        // [rows][k], rows a_stride elements apart
  ptrdiff_t a_stride;
  const bf16* b;        // column block j at b + j * b_stride
  ptrdiff_t b_stride;
  int64_t k_pairs;
  float* c;             // [rows][blocks * 16], rows c_stride elements apart
  ptrdiff_t c_stride;
  bool accumulate;      // add to c, rather than overwrite it
  const bf16* prefetch;  // lines to ask memory for meanwhile, laid out as b; how many blocks of it: see below
};

// blocks_ahead: how many blocks (0, 1, or all of the tile's) of `prefetch` to fetch along the way.
void gemm_tile(const GemmTile& tile, int rows, int blocks, int blocks_ahead);

}  // namespace starling
