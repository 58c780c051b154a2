// Products of many rows by tiles of AMX: of 16 rows of 64 bytes each, of which one instruction multiplies two.
//
// A packed matrix is made for it as it is: 16 lines of a column block, one behind the other, are a tile of 32 k and 16 columns, or of
// 64 k where they are bytes. Rows of x are copied once into tiles of 16 rows. With STARLING_TILE_MODEL tiles are memory, so that tests
// run on other CPUs.
#pragma once

#include <algorithm>

#include "gemm_tile.h"
#include "parallel.h"

#if defined(__AMX_TILE__) || defined(STARLING_TILE_MODEL)
#define STARLING_TILES
#endif

namespace starling {

#ifdef STARLING_TILES

// k of a tile of bf16, and of one of bytes.
constexpr int64_t kTileDepth = 32, kByteTileDepth = 64;
constexpr int64_t kTileBytes = 1024;
// More rows than these are multiplied by tiles: of lines of bf16, of codes unpacked to bytes, and to bf16. On a Xeon of the 5th
// generation 8 rows of bf16 are then 1.5 times as fast, 16 rows of bytes as well; 8 rows of those, and 32 of the last, are as fast.
constexpr int64_t kFewRows = 4, kFewRowsOfBytes = 8, kFewRowsOfCodes = 32;
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
inline void model_multiply_bytes(int c, int a, int b) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      int32_t sum;
      std::memcpy(&sum, model_tile(c).rows[i] + j * 4, 4);
      for (int quad = 0; quad < 16; ++quad)
        for (int byte = quad * 4; byte < quad * 4 + 4; ++byte)
          sum += static_cast<int8_t>(model_tile(a).rows[i][byte]) * static_cast<int8_t>(model_tile(b).rows[quad][j * 4 + byte % 4]);
      std::memcpy(model_tile(c).rows[i] + j * 4, &sum, 4);
    }
}
#define TILE_LOAD(n, p, stride) model_load(n, p, stride)
#define TILE_STREAM(n, p, stride) model_load(n, p, stride)
#define TILE_STORE(n, p, stride) model_store(n, p, stride)
#define TILE_ZERO(n) std::memset(&model_tile(n), 0, sizeof(ModelTile))
template <typename T, int C, int A, int B>
void multiply_tiles() {
  sizeof(T) == 1 ? model_multiply_bytes(C, A, B) : model_multiply(C, A, B);
}
struct TilesInUse {};
inline void fetch_to_write(const void*) {}
#else
// The compiler's own macros do not say that they read and write memory.
#define TILE_LOAD(n, p, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(p), "r"(static_cast<ptrdiff_t>(stride)) : "memory")
// The same of what is not read again soon: it does not take the place of other lines in the first-level cache.
#define TILE_STREAM(n, p, stride) \
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #n ::"r"(p), "r"(static_cast<ptrdiff_t>(stride)) : "memory")
#define TILE_STORE(n, p, stride) \
  asm volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(p), "r"(static_cast<ptrdiff_t>(stride)) : "memory")
#define TILE_ZERO(n) asm volatile("tilezero %%tmm" #n ::: "memory")
// Adds the product of tiles A and B, of bf16 or of bytes with a sign, to tile C.
template <typename T, int C, int A, int B>
void multiply_tiles() {
  if constexpr (sizeof(T) == 1)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B) : "memory");
  else
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B) : "memory");
}

inline void fetch_to_write(const void* line) { asm volatile("prefetchw (%0)" ::"r"(line)); }

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

// 16 rows of x: lines of 64 bytes, `line` bytes apart. The same lines of the next k are `step` bytes further.
struct RowTile {
  const void* at;
  ptrdiff_t line, step;
};

// What is fetched while tiles are multiplied: two of the lines to which 32 rows are written, and one of each block that is next, a step.
// Without it, products of 1,024 rows take 1.1 times as long (Xeon of the 5th generation, two threads).
struct Ahead {
  const char* out = nullptr;
  ptrdiff_t line = 0;
  const char* columns = nullptr;
  ptrdiff_t next_block = 0;

  void step() {
    if (out != nullptr) {
      fetch_to_write(out), fetch_to_write(out + line);
      out += 2 * line;
    }
    if (columns != nullptr) {
      __builtin_prefetch(columns, 0, 2), __builtin_prefetch(columns + next_block, 0, 2);
      columns += 64;
    }
  }
};

template <int ROWS, int BLOCKS>
void zero_sums() {
  TILE_ZERO(0);
  if (BLOCKS > 1) TILE_ZERO(1);
  if (ROWS > 1) TILE_ZERO(2);
  if (ROWS > 1 && BLOCKS > 1) TILE_ZERO(3);
}
// Sums [16 ROWS][16 BLOCKS] of 4 bytes each, in rows `line` bytes apart.
template <int ROWS, int BLOCKS>
void load_sums(const void* sums, ptrdiff_t line) {
  const char *top = static_cast<const char*>(sums), *below = top + 16 * line;
  TILE_STREAM(0, top, line);
  if (BLOCKS > 1) TILE_STREAM(1, top + 64, line);
  if (ROWS > 1) TILE_STREAM(2, below, line);
  if (ROWS > 1 && BLOCKS > 1) TILE_STREAM(3, below + 64, line);
}
template <int ROWS, int BLOCKS>
void store_sums(void* sums, ptrdiff_t line) {
  char *top = static_cast<char*>(sums), *below = top + 16 * line;
  TILE_STORE(0, top, line);
  if (BLOCKS > 1) TILE_STORE(1, top + 64, line);
  if (ROWS > 1) TILE_STORE(2, below, line);
  if (ROWS > 1 && BLOCKS > 1) TILE_STORE(3, below + 64, line);
}

// Adds the products of rows and column blocks of T, `steps` tiles deep, to the sums in tiles. Those of the next block are b_stride
// bytes further. STREAMS: rows are more than the first-level cache holds.
template <typename T, int ROWS, int BLOCKS, bool STREAMS>
void add_products(RowTile top, RowTile below, const void* columns, ptrdiff_t b_stride, int64_t steps, Ahead& ahead) {
  const char *a = static_cast<const char*>(top.at), *c = static_cast<const char*>(below.at), *b = static_cast<const char*>(columns);
  for (int64_t step = 0; step < steps; ++step, a += top.step, c += below.step, b += kTileBytes) {
    TILE_LOAD(6, b, 64);
    if (STREAMS)
      TILE_STREAM(4, a, top.line);
    else
      TILE_LOAD(4, a, top.line);
    multiply_tiles<T, 0, 4, 6>();
    ahead.step();
    if (BLOCKS > 1) {
      TILE_LOAD(7, b + b_stride, 64);
      multiply_tiles<T, 1, 4, 7>();
    }
    if (ROWS > 1) {
      if (STREAMS)
        TILE_STREAM(5, c, below.line);
      else
        TILE_LOAD(5, c, below.line);
      multiply_tiles<T, 2, 5, 6>();
      if (BLOCKS > 1) multiply_tiles<T, 3, 5, 7>();
    }
  }
}

// c [16 ROWS][16 BLOCKS] = or += rows of x by column blocks, in rows c_stride floats apart.
template <int ROWS, int BLOCKS, bool STREAMS>
void run_tiles(RowTile top, RowTile below, const bf16* b, ptrdiff_t b_stride, int64_t steps, float* c, ptrdiff_t c_stride,
               bool accumulate, Ahead ahead) {
  const ptrdiff_t line = c_stride * sizeof(float);
  accumulate ? load_sums<ROWS, BLOCKS>(c, line) : zero_sums<ROWS, BLOCKS>();
  add_products<bf16, ROWS, BLOCKS, STREAMS>(top, below, b, b_stride * sizeof(bf16), steps, ahead);
  store_sums<ROWS, BLOCKS>(c, line);
}

// Two blocks of so many steps fill two thirds of a first-level cache of 48 KB, and are multiplied by all rows.
constexpr int64_t kStepsAtOnce = 16;
// Sums of so many columns of 512 rows, and a chunk of those, share a second-level cache of 2 MB with what is read. Where the rows fit with
// all of their tiles, sums of fewer columns leave room for them: 1.04 times as fast.
constexpr int64_t kBlocksAtOnce = 16, kBlocksBesideRows = 4, kStepsOfRows = 32;

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

  RowTile tile(int64_t i, int64_t step) const { return {tiles + i * 16 * k + step * 512, 64, kTileBytes}; }

  // Copies the rows of one tile: row_of(i) is where row i is.
  template <typename RowOf>
  void copy(int64_t tile, const RowOf& row_of) const {
    for (int64_t i = tile * 16; i < tile * 16 + 16; ++i) {
      bf16* to = tiles + tile * 16 * k + i % 16 * kTileDepth;
      for (int64_t step = 0; step < k / kTileDepth; ++step)
        if (i < m)
          std::memcpy(to + step * 512, row_of(i) + step * kTileDepth, 64);
        else
          std::memset(to + step * 512, 0, 64);
    }
  }
};

// Column blocks in tiles; those of the next block are `stride` elements further.
template <typename T>
struct ColumnTiles {
  const T* at;
  ptrdiff_t stride;
};

// Rows in tiles of bf16, by a matrix of which `tiles_of(block, here, step, steps, memory)` returns `here` blocks from tile `step` on:
// where they are, or in `memory`, which holds 2 * kStepsAtOnce tiles. `lines(block, step)` is where they are, or null.
template <typename TilesOf>
struct Bf16TileProduct {
  TiledRows rows;
  TilesOf tiles_of;

  int64_t m() const { return rows.m; }
  int64_t steps() const { return rows.k / kTileDepth; }
  ColumnTiles<char> lines(int64_t block, int64_t step) const { return tiles_of.lines(block, step); }
  ColumnTiles<bf16> columns(int64_t block, int64_t here, int64_t step, int64_t steps, void* memory) const {
    return tiles_of(block, here, step, steps, static_cast<bf16*>(memory));
  }
  template <int ROWS, int BLOCKS>
  void run(int64_t tile, int64_t, int64_t step, int64_t steps, ColumnTiles<bf16> b, float* c, ptrdiff_t c_stride, Ahead ahead) const {
    const RowTile top = rows.tile(tile, step), below = ROWS > 1 ? rows.tile(tile + 1, step) : top;
    run_tiles<ROWS, BLOCKS, true>(top, below, b.at, b.stride, steps, c, c_stride, step > 0, ahead);
  }
};

// All rows of a product by the column blocks of one thread; `finish` as in PackedProduct::run_span, for rows from `row0` on. It says
// where it writes a row's sums from a column on (`line_of`), or null, and how far the next row is (`line`, in bytes).
template <typename Product, typename Finish>
void multiply_by_tiles(const Product& product, int64_t row0, int64_t n, Span blocks, const Finish& finish) {
  if (blocks.begin >= blocks.end) return;
  constexpr int64_t width = 2 * kBlockCols;
  const int64_t m = product.m(), row_tiles = ceil_div(m, 16), steps = product.steps();
  const int64_t pair_size = ceil_div(row_tiles, 2) * 32 * width;
  const int64_t panel_blocks = steps <= kStepsOfRows ? kBlocksBesideRows : kBlocksAtOnce;
  const size_t sums_size = panel_blocks / 2 * pair_size, memory_size = 2 * kStepsAtOnce * kTileBytes;
  Scratch& scratch = tile_scratch();
  scratch.reset(memory_size + Scratch::padded<float>(sums_size));
  char* memory = scratch.take<char>(memory_size);
  float* sums = scratch.take<float>(sums_size);
  TilesInUse in_use;
  (void)in_use;
  for (int64_t panel = blocks.begin; panel < blocks.end; panel += panel_blocks) {
    const int64_t panel_end = std::min(panel + panel_blocks, blocks.end);
    for (int64_t step = 0; step < steps; step += kStepsAtOnce) {
      const int64_t here = std::min(kStepsAtOnce, steps - step);
      const bool last = step + here == steps;
      for (int64_t block = panel; block < panel_end; block += 2) {
        const int64_t pair = std::min<int64_t>(2, panel_end - block), col = block * kBlockCols;
        const auto b = product.columns(block, pair, step, here, memory);
        const int64_t beside = block + 2, next_block = beside < panel_end ? beside : last ? panel_end : panel;
        const int64_t next_step = beside < panel_end ? step : last ? 0 : step + here;
        const ColumnTiles<char> next = next_block < blocks.end ? product.lines(next_block, next_step) : ColumnTiles<char>{};
        for (int64_t tile = 0; tile < row_tiles; tile += 2) {
          const int64_t rows_here = std::min<int64_t>(32, m - tile * 16);
          float* c = sums + (block - panel) / 2 * pair_size + tile * 16 * width;
          Ahead ahead;
          if (last && rows_here == 32) ahead.out = finish.line_of(row0 + tile * 16, col), ahead.line = finish.line();
          if (next.at != nullptr) ahead.columns = next.at + tile / 2 * here * 64, ahead.next_block = next.stride;
          const auto run = tile + 1 < row_tiles
                               ? (pair > 1 ? &Product::template run<2, 2> : &Product::template run<2, 1>)
                               : (pair > 1 ? &Product::template run<1, 2> : &Product::template run<1, 1>);
          (product.*run)(tile, block, step, here, b, c, width, ahead);
          if (last) finish(c, width, row0 + tile * 16, rows_here, col, std::min(pair * kBlockCols, n - col));
        }
      }
    }
  }
}

// Rows of x [m, k], which are copied into tiles first, by the column blocks of one thread.
template <typename TilesOf, typename Finish>
void multiply_rows_by_tiles(const bf16* x, ptrdiff_t x_stride, int64_t m, int64_t n, int64_t k, const TilesOf& tiles_of, int64_t row0,
                            Span blocks, const Finish& finish) {
  static thread_local Scratch scratch;
  scratch.reset(Scratch::padded<bf16>(TiledRows::size(m, k)));
  const TiledRows rows{scratch.take<bf16>(TiledRows::size(m, k)), m, k};
  for (int64_t tile = 0; tile < rows.count(); ++tile) rows.copy(tile, [&](int64_t i) { return x + i * x_stride; });
  multiply_by_tiles(Bf16TileProduct<TilesOf>{rows, tiles_of}, row0, n, blocks, finish);
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
    parallel_for(rows.count(), threads,
                 [&](int64_t tile) { rows.copy(tile, [&](int64_t i) { return x + (row + i) * x_stride; }); });
    in_parallel(threads, [&](Part part) {
      const Span mine = part.of(ceil_div(blocks, 2));
      const Bf16TileProduct<TilesOf> product{rows, tiles_of};
      multiply_by_tiles(product, row, n, {mine.begin * 2, std::min(mine.end * 2, blocks)}, finish);
    });
  }
}

#endif

}  // namespace starling
