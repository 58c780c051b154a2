// Products of many rows by tiles of AMX: of 16 rows of 64 bytes each, of which one instruction multiplies two.
//
// A packed matrix is made for it as it is: 16 lines of a column block, one behind the other, are a tile of 32 k and 16 columns. Rows
// of x are copied once into tiles of 16 rows and 32 k. With STARLING_TILE_MODEL tiles are memory, so that tests run on other CPUs.
#pragma once

#include <algorithm>

#include "gemm_tile.h"
#include "parallel.h"

#if defined(__AMX_TILE__) || defined(STARLING_TILE_MODEL)
#define STARLING_TILES
#endif

namespace starling {

#ifdef STARLING_TILES

constexpr int64_t kTileDepth = 32;
// More rows than these are multiplied by tiles. Of few, reading the matrix takes longer than multiplying, or unpacking its codes.
constexpr int64_t kFewRows = kTileRows, kFewRowsOfCodes = 32;
inline bool by_tiles(int64_t m, int64_t k, int64_t few = kFewRows) { return m > few && k % kTileDepth == 0; }

#ifdef STARLING_TILE_MODEL
// What the instructions do, by Intel's manual (Architecture Instruction Set Extensions Programming Reference, chapter 3).
struct ModelTile {
  alignas(64) uint8_t rows[16][64];
};
inline ModelTile& model_tile(int n) {
  static thread_local ModelTile tiles[8];
  return tiles[n];
}
inline void model_load(int n, const void* p, ptrdiff_t stride) {
  for (int i = 0; i < 16; ++i) std::memcpy(model_tile(n).rows[i], static_cast<const char*>(p) + i * stride, 64);
}
inline void model_store(int n, void* p, ptrdiff_t stride) {
  for (int i = 0; i < 16; ++i) std::memcpy(static_cast<char*>(p) + i * stride, model_tile(n).rows[i], 64);
}
inline void model_multiply(int c, int a, int b) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      float even = 0, odd = 0, sum;
      for (int pair = 0; pair < 16; ++pair) {
        bf16 left[2], right[2];
        std::memcpy(left, model_tile(a).rows[i] + pair * 4, 4);
        std::memcpy(right, model_tile(b).rows[pair] + j * 4, 4);
        even += to_float(left[0]) * to_float(right[0]), odd += to_float(left[1]) * to_float(right[1]);
      }
      std::memcpy(&sum, model_tile(c).rows[i] + j * 4, 4);
      sum += even + odd;
      std::memcpy(model_tile(c).rows[i] + j * 4, &sum, 4);
    }
}
#define TILE_LOAD(n, p, stride) model_load(n, p, stride)
#define TILE_STORE(n, p, stride) model_store(n, p, stride)
#define TILE_ZERO(n) std::memset(&model_tile(n), 0, sizeof(ModelTile))
#define TILE_MULTIPLY(c, a, b) model_multiply(c, a, b)
struct TilesInUse {};
#else
// The compiler's own macros do not say that they read and write memory.
#define TILE_LOAD(n, p, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(p), "r"(static_cast<ptrdiff_t>(stride)) : "memory")
#define TILE_STORE(n, p, stride) \
  asm volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(p), "r"(static_cast<ptrdiff_t>(stride)) : "memory")
#define TILE_ZERO(n) asm volatile("tilezero %%tmm" #n ::: "memory")
#define TILE_MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

// While it lives, this thread has 8 tiles of 16 rows of 64 bytes. Others of its tiles, as oneDNN's, are configured at each of its
// own products.
class TilesInUse {
 public:
  TilesInUse() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64, "as the processor reads it");
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TilesInUse() { asm volatile("tilerelease"); }
};
#endif

// c [16 ROWS][16 BLOCKS] = or += rows of x by column blocks, `steps` tiles deep. Tiles of x are 512 elements each, those of the next
// 16 rows a_stride further; those of the next block are b_stride further.
template <int ROWS, int BLOCKS>
void run_tiles(const bf16* a, ptrdiff_t a_stride, const bf16* b, ptrdiff_t b_stride, int64_t steps, float* c, ptrdiff_t c_stride,
               bool accumulate) {
  const ptrdiff_t line = c_stride * sizeof(float);
  float* below = c + 16 * c_stride;
  TILE_ZERO(0);
  if (BLOCKS > 1) TILE_ZERO(1);
  if (ROWS > 1) TILE_ZERO(2);
  if (ROWS > 1 && BLOCKS > 1) TILE_ZERO(3);
  if (accumulate) {
    TILE_LOAD(0, c, line);
    if (BLOCKS > 1) TILE_LOAD(1, c + 16, line);
    if (ROWS > 1) TILE_LOAD(2, below, line);
    if (ROWS > 1 && BLOCKS > 1) TILE_LOAD(3, below + 16, line);
  }
  for (int64_t step = 0; step < steps; ++step, a += 512, b += 512) {
    TILE_LOAD(6, b, 64);
    TILE_LOAD(4, a, 64);
    TILE_MULTIPLY(0, 4, 6);
    if (BLOCKS > 1) {
      TILE_LOAD(7, b + b_stride, 64);
      TILE_MULTIPLY(1, 4, 7);
    }
    if (ROWS > 1) {
      TILE_LOAD(5, a + a_stride, 64);
      TILE_MULTIPLY(2, 5, 6);
      if (BLOCKS > 1) TILE_MULTIPLY(3, 5, 7);
    }
  }
  TILE_STORE(0, c, line);
  if (BLOCKS > 1) TILE_STORE(1, c + 16, line);
  if (ROWS > 1) TILE_STORE(2, below, line);
  if (ROWS > 1 && BLOCKS > 1) TILE_STORE(3, below + 16, line);
}

// Two blocks of so many steps fill two thirds of a first-level cache of 48 KB, and are multiplied by all rows.
constexpr int64_t kStepsAtOnce = 16;
// Sums of so many columns of 512 rows, and a chunk of those, share a second-level cache of 2 MB with what is read.
constexpr int64_t kBlocksAtOnce = 16;

// Memory of a thread for sums, and for codes that are unpacked.
inline Scratch& tile_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// Rows of x as tiles of 16 rows and 32 k: [row tiles][k / 32][16][32]. The last one's rows past the end are zeros.
struct TiledRows {
  bf16* tiles;
  int64_t m, k;

  static int64_t size(int64_t m, int64_t k) { return ceil_div(m, 16) * 16 * k; }
  int64_t count() const { return ceil_div(m, 16); }

  // Copies the rows of one tile; x is where row 0 is.
  void copy(int64_t tile, const bf16* x, ptrdiff_t x_stride) const {
    for (int64_t i = tile * 16; i < tile * 16 + 16; ++i)
      for (int64_t step = 0; step < k / kTileDepth; ++step) {
        bf16* to = tiles + tile * 16 * k + step * 512 + i % 16 * kTileDepth;
        if (i < m)
          std::memcpy(to, x + i * x_stride + step * kTileDepth, 64);
        else
          std::memset(to, 0, 64);
      }
  }
};

// Rows by the column blocks of one thread; `finish` as in PackedProduct::run_span, for rows from `row0` on.
// `tiles_of(block, here, step, steps, memory)` returns `here` blocks as packed bf16 from tile `step` on, and what lies between them:
// where they are, or in `memory`, which holds 2 * kStepsAtOnce tiles.
template <typename TilesOf, typename Finish>
void multiply_by_tiles(const TiledRows& rows, int64_t row0, int64_t n, Span blocks, const TilesOf& tiles_of, const Finish& finish) {
  if (blocks.begin >= blocks.end) return;
  const int64_t m = rows.m, row_tiles = rows.count(), steps = rows.k / kTileDepth, width = kBlocksAtOnce * kBlockCols;
  const size_t sums_size = row_tiles * 16 * width, memory_size = 2 * kStepsAtOnce * 512;
  Scratch& scratch = tile_scratch();
  scratch.reset(Scratch::padded<bf16>(memory_size) + Scratch::padded<float>(sums_size));
  bf16* memory = scratch.take<bf16>(memory_size);
  float* sums = scratch.take<float>(sums_size);
  TilesInUse in_use;
  (void)in_use;
  for (int64_t panel = blocks.begin; panel < blocks.end; panel += kBlocksAtOnce) {
    const int64_t panel_end = std::min(panel + kBlocksAtOnce, blocks.end);
    for (int64_t step = 0; step < steps; step += kStepsAtOnce) {
      const int64_t here = std::min(kStepsAtOnce, steps - step);
      const bool last = step + here == steps;
      for (int64_t block = panel; block < panel_end; block += 2) {
        const int64_t pair = std::min<int64_t>(2, panel_end - block), col = block * kBlockCols;
        const auto [b, b_stride] = tiles_of(block, pair, step, here, memory);
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
          const bf16* a = rows.tiles + (tile * steps + step) * 512;
          float* c = sums + tile * 16 * width + (block - panel) * kBlockCols;
          const auto run = tile + 1 < row_tiles ? (pair > 1 ? run_tiles<2, 2> : run_tiles<2, 1>)
                                                : (pair > 1 ? run_tiles<1, 2> : run_tiles<1, 1>);
          run(a, steps * 512, b, b_stride, here, c, width, step > 0);
          const int64_t rows_here = std::min<int64_t>(32, m - tile * 16);
          if (last) finish(c, width, row0 + tile * 16, rows_here, col, std::min(pair * kBlockCols, n - col));
        }
      }
    }
  }
}

// All rows of x [m, k] by a matrix of n rows, kMost rows at a time: threads copy them into tiles first, together. Each thread's columns
// are whole pairs of blocks, since a gated layer's 16 columns are two blocks.
template <int64_t kMost, typename TilesOf, typename Finish>
void multiply_all_by_tiles(const bf16* x, ptrdiff_t x_stride, int64_t m, int64_t n, int64_t k, const TilesOf& tiles_of,
                           const Finish& finish, int threads) {
  Scratch& scratch = Scratch::mine();
  const int64_t blocks = ceil_div(n, kBlockCols);
  for (int64_t row = 0; row < m; row += kMost) {
    const int64_t here = std::min(kMost, m - row);
    scratch.reset(Scratch::padded<bf16>(TiledRows::size(here, k)));
    const TiledRows rows{scratch.take<bf16>(TiledRows::size(here, k)), here, k};
    parallel_for(rows.count(), threads, [&](int64_t tile) { rows.copy(tile, x + row * x_stride, x_stride); });
    in_parallel(threads, [&](Part part) {
      const Span mine = part.of(ceil_div(blocks, 2));
      multiply_by_tiles(rows, row, n, {mine.begin * 2, std::min(mine.end * 2, blocks)}, tiles_of, finish);
    });
  }
}

#endif

}  // namespace starling
