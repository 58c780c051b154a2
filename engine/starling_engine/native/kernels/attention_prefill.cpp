// Many query rows: bound by arithmetic. Keys and values are packed, a tile at a time, into the layout of the matrix
// micro-kernel, and a few query rows at a time go through it while scores and weights stay in the first-level cache
// (FlashAttention's order of work, https://arxiv.org/abs/2205.14135). Tiles of AMX read that layout, too, and rows as they lie.
#include <algorithm>

#include "attention.h"
#include "tiles.h"

namespace starling {
namespace {

template <typename T>
struct KeyTile {
  int64_t size;  // keys that fit
  T* keys;       // [size / 16][dim / kDepth lines]
  T* values;     // [dim / 16][size / kDepth lines]

  // Packs the rows in both forms, with zeros past `count` up to a multiple of `whole`.
  void pack(const T* const* rows, int64_t count, int64_t whole, int64_t values_at, int64_t dim) {
    for (int64_t i = 0; i < ceil_div(count, whole) * whole; i += 16) {
      const int64_t here = std::min<int64_t>(16, count - i);
      pack_16_keys(rows + i, here, dim, keys + i * dim);
      pack_16_values(rows + i, here, values_at, dim, values + i / kDepth<T> * kLine<T>);
    }
  }

  int64_t key_stride(int64_t dim) const { return kBlockCols * dim; }
  int64_t value_stride() const { return kBlockCols * size; }

 private:
  static void pack_16_keys(const T* const* rows, int64_t count, int64_t dim, T* out) {
    for (int64_t d = 0; d < dim; d += kLine<T>) {
      const T* row[16];
      for (int i = 0; i < 16; ++i) row[i] = i < count ? rows[i] + d : nullptr;
      const int64_t words = std::min<int64_t>(16, (dim - d) / kDepth<T>);
      transpose16(row, words, reinterpret_cast<int32_t*>(out + d * 16), store_words);
    }
  }

  void pack_16_values(const T* const* rows, int64_t count, int64_t values_at, int64_t dim, T* out) const {
    alignas(64) static const T zeros[512] = {};
    for (int64_t i = 0; i < 16; i += kDepth<T>) {
      const T* first = i < count ? rows[i] + values_at : zeros;
      const T* second = i + 1 < count ? rows[i + 1] + values_at : zeros;
      for (int64_t d = 0; d < dim; d += 16) write_line(first + d, second + d, out + i / kDepth<T> * kLine<T> + d * size);
    }
  }

  static void write_line(const float* first, const float*, float* out) { store16(out, load16(first)); }
  // Interleaves two rows.
  static void write_line(const bf16* first, const bf16* second, bf16* out) {
    const Floats low = load16(first), high = load16(second);
    for (int i = 0; i < kParts; ++i)
      store_words(out + i * 2 * kLanes, (IReg)((UReg)low.part[i] >> 16) | (IReg)high.part[i]);
  }
};

#ifdef STARLING_TILES
constexpr bool kHasTiles = true;
// As `multiply`. What lies behind the last row, up to a multiple of 16, is multiplied, too.
void multiply_by_tiles(const GemmTile<bf16>& tile, int64_t rows, int64_t blocks) {
  const RowTile top{tile.a, tile.a_stride * 2, 64}, below{tile.a + 16 * tile.a_stride, tile.a_stride * 2, 64};
  for (int64_t block = 0; block < blocks; block += 2) {
    const bool two = block + 1 < blocks;
    const auto run = rows > 16 ? (two ? run_tiles<2, 2, false> : run_tiles<2, 1, false>)
                               : (two ? run_tiles<1, 2, false> : run_tiles<1, 1, false>);
    run(top, below, tile.b + block * tile.b_stride, tile.b_stride, tile.lines / 16, tile.c + block * kBlockCols, tile.c_stride,
        tile.accumulate, Ahead{});
  }
}
#else
constexpr bool kHasTiles = false;
struct TilesInUse {};
#endif

// c[rows][blocks * 16] = a b, or += a b.
template <typename T>
void multiply(GemmTile<T> tile, int64_t rows, int64_t blocks, bool tiled) {
#ifdef STARLING_TILES
  if constexpr (std::is_same_v<T, bf16>)
    if (tiled) return multiply_by_tiles(tile, rows, blocks);
#endif
  const int64_t most = tile_blocks(rows);
  for (; blocks > 0; blocks -= most) {
    gemm_tile(tile, static_cast<int>(rows), static_cast<int>(std::min(blocks, most)), 0);
    tile.b += most * tile.b_stride;
    tile.c += most * kBlockCols;
  }
}

// Converts a row of keys and values of a cache that holds C to T.
template <typename T, typename C>
void unpack_row(const C* key, int64_t values_at, int64_t dim, T* to, int64_t unpacked_values_at) {
  load_rows(key, 1, dim, to);
  load_rows(key + values_at, 1, dim, to + unpacked_values_at);
}

}  // namespace

template <typename T, typename C>
State attend_tile(const Attention<T, C>& a, const Task& task) {
  const int64_t group = a.group(), dim = a.dim, rows = task.tokens * group;
  using O = Operand<T>;
  constexpr bool kPacked = !std::is_same_v<O, C>;
  constexpr int64_t kMaxKeys = 128;
  const int64_t tile_keys = dim <= 128 ? kMaxKeys : kMaxKeys / 2;
  // Rows at a time, and keys that are multiplied by at once. Whatever the number of rows, so that a row's sums are the same.
  const bool tiled = kHasTiles && std::is_same_v<O, bf16> && dim % 32 == 0;
  const int64_t step = tiled ? 32 : kTileRows, whole = tiled ? 32 : 16, room = ceil_div(rows, step) * step;
  Scratch& scratch = Scratch::mine();
  scratch.reset(State::bytes(room, dim) + Scratch::padded<O>(room * dim) + (kPacked ? 4 : 2) * Scratch::padded<O>(tile_keys * dim) +
                Scratch::padded<float>(step * kMaxKeys) + Scratch::padded<O>(step * kMaxKeys));
  const State state = State::fresh(scratch, room, dim);
  O* queries = scratch.take<O>(room * dim);
  KeyTile<O> tile{tile_keys, scratch.take<O>(tile_keys * dim), scratch.take<O>(tile_keys * dim)};
  float* scores = scratch.take<float>(step * kMaxKeys);
  O* weights = scratch.take<O>(step * kMaxKeys);
  O* unpacked = kPacked ? scratch.take<O>(2 * tile_keys * dim) : nullptr;
  const int64_t values_at = kPacked ? tile_keys * dim : values_after(a);
  gather_queries(a, task, queries);

  const Scoring score(a.scale, a.soft_cap);
  const TilesInUse in_use{};
  (void)in_use;
  const O* rows_of_keys[kMaxKeys];
  for (int64_t begin = task.key_begin; begin < task.key_end; begin += tile_keys) {
    const int64_t count = std::min(tile_keys, task.key_end - begin);
    for (int64_t i = 0; i < count; ++i) {
      if constexpr (kPacked) {
        unpack_row(key_row(a, task, begin + i), values_after(a), dim, unpacked + i * dim, values_at);
        rows_of_keys[i] = unpacked + i * dim;
      } else {
        rows_of_keys[i] = key_row(a, task, begin + i);
      }
    }
    tile.pack(rows_of_keys, count, whole, values_at, dim);
    for (int64_t row = 0; row < rows; row += step) {
      const int64_t here = std::min(step, rows - row);
      // Keys of this tile that some of these rows see: causal at the top, windowed at the bottom.
      const int64_t first_position = task.position + row / group;
      const int64_t last_position = task.position + (row + here - 1) / group;
      const int64_t end = std::min(count, last_position + 1 - begin);
      if (end <= 0 || a.first_key(first_position) - begin >= count) continue;
      const int64_t padded = ceil_div(end, whole) * whole;
      multiply<O>({queries + row * dim, dim, tile.keys, tile.key_stride(dim), dim / kDepth<O>, scores, kMaxKeys, false,
                   nullptr},
                  here, padded / 16, tiled);
      for (int64_t i = 0; i < here; ++i) {
        const int64_t r = row + i, position = task.position + r / group;
        const int64_t from = std::max<int64_t>(0, a.first_key(position) - begin);
        const int64_t to = std::min(count, position + 1 - begin);
        float* dots = scores + i * kMaxKeys;
        const float shrink =
            fold_scores(score, dots, from, to, padded, weights + i * kMaxKeys, dots, state.top[r], state.mass[r]);
        if (shrink != 1.0f) scale_row(state.sums + r * dim, dim, shrink);
      }
      multiply<O>({weights, kMaxKeys, tile.values, tile.value_stride(), padded / kDepth<O>, state.sums + row * dim, dim,
                   true, nullptr},
                  here, dim / kBlockCols, tiled);
    }
  }
  return state;
}

template State attend_tile(const Attention<bf16>&, const Task&);
template State attend_tile(const Attention<float>&, const Task&);
template State attend_tile(const Attention<bf16, fp8>&, const Task&);
template State attend_tile(const Attention<float, fp8>&, const Task&);
template State attend_tile(const Attention<bf16, int8_code>&, const Task&);
template State attend_tile(const Attention<bf16, int4_pair>&, const Task&);
template State attend_tile(const Attention<float, int8_code>&, const Task&);
template State attend_tile(const Attention<float, int4_pair>&, const Task&);

}  // namespace starling
