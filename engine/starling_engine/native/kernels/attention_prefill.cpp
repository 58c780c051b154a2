// Many query rows: bound by arithmetic. Keys and values are packed, a tile at a time, into the layout of the matrix
// micro-kernel, and each 8 query rows go through it while scores and weights stay in the first-level cache
// (FlashAttention's order of work, https://arxiv.org/abs/2205.14135).
#include <algorithm>

#include "attention.h"
#include "gemm_tile.h"

namespace starling {
namespace {

template <typename T>
struct KeyTile {
  int64_t size;  // keys that fit
  T* keys;       // [size / 16][dim / kDepth lines]
  T* values;     // [dim / 16][size / kDepth lines]

  // Packs the rows in both forms, with zeros past `count` up to a multiple of 16.
  void pack(const T* const* rows, int64_t count, int64_t values_at, int64_t dim) {
    for (int64_t i = 0; i < count; i += 16) {
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
      const int64_t words = std::min<int64_t>(16, (dim - d) / kDepth<T>);
      __m512i r[16];
      for (int i = 0; i < 16; ++i)
        r[i] = i < count ? _mm512_maskz_loadu_epi32(first_lanes(words), rows[i] + d) : _mm512_setzero_si512();
      transpose16x16(r);
      for (int64_t i = 0; i < words; ++i) _mm512_store_si512(out + (d / kDepth<T> + i) * kLine<T>, r[i]);
    }
  }

  void pack_16_values(const T* const* rows, int64_t count, int64_t values_at, int64_t dim, T* out) const {
    alignas(64) static const T zeros[256] = {};
    for (int64_t i = 0; i < 16; i += kDepth<T>) {
      const T* first = i < count ? rows[i] + values_at : zeros;
      const T* second = i + 1 < count ? rows[i + 1] + values_at : zeros;
      for (int64_t d = 0; d < dim; d += 16)
        _mm512_store_si512(out + i / kDepth<T> * kLine<T> + d * size, value_line(first + d, second + d));
    }
  }

  static __m512i value_line(const float* first, const float*) { return _mm512_loadu_si512(first); }
  static __m512i value_line(const bf16* first, const bf16* second) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
};

// c[rows][blocks * 16] = a b, or += a b, in tiles.
template <typename T>
void multiply(GemmTile<T> tile, int64_t rows, int64_t blocks) {
  for (; blocks > 0; blocks -= kTileBlocks) {
    gemm_tile(tile, static_cast<int>(rows), static_cast<int>(std::min<int64_t>(blocks, kTileBlocks)), 0);
    tile.b += kTileBlocks * tile.b_stride;
    tile.c += kTileBlocks * kBlockCols;
  }
}

// Converts a row of keys and values of a cache in fp8 to T.
template <typename T>
void unpack_row(const fp8* key, int64_t values_at, int64_t dim, T* to, int64_t unpacked_values_at) {
  unpack(key, dim, to);
  unpack(key + values_at, dim, to + unpacked_values_at);
}

}  // namespace

template <typename T, typename C>
State attend_tile(const Attention<T, C>& a, const Task& task) {
  const int64_t group = a.group(), dim = a.dim, rows = task.tokens * group;
  constexpr bool kPacked = !std::is_same_v<T, C>;
  constexpr int64_t kMaxKeys = 128;
  const int64_t tile_keys = dim <= 128 ? kMaxKeys : kMaxKeys / 2;
  Scratch& scratch = Scratch::mine();
  scratch.reset(State::bytes(rows, dim) + Scratch::padded<T>(rows * dim) +
                (kPacked ? 4 : 2) * Scratch::padded<T>(tile_keys * dim) +
                Scratch::padded<float>(kTileRows * kMaxKeys) + Scratch::padded<T>(kTileRows * kMaxKeys));
  const State state = State::fresh(scratch, rows, dim);
  T* queries = scratch.take<T>(rows * dim);
  KeyTile<T> tile{tile_keys, scratch.take<T>(tile_keys * dim), scratch.take<T>(tile_keys * dim)};
  float* scores = scratch.take<float>(kTileRows * kMaxKeys);
  T* weights = scratch.take<T>(kTileRows * kMaxKeys);
  T* unpacked = kPacked ? scratch.take<T>(2 * tile_keys * dim) : nullptr;
  const int64_t values_at = kPacked ? tile_keys * dim : values_after(a);
  gather_queries(a, task, queries);

  const Scoring score(a.scale, a.soft_cap);
  const T* rows_of_keys[kMaxKeys];
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
    tile.pack(rows_of_keys, count, values_at, dim);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t here = std::min<int64_t>(kTileRows, rows - row);
      // Keys of this tile that some of these rows see: causal at the top, windowed at the bottom.
      const int64_t first_position = task.position + row / group;
      const int64_t last_position = task.position + (row + here - 1) / group;
      const int64_t end = std::min(count, last_position + 1 - begin);
      if (end <= 0 || a.first_key(first_position) - begin >= count) continue;
      const int64_t padded = (end + 15) / 16 * 16;
      multiply<T>({queries + row * dim, dim, tile.keys, tile.key_stride(dim), dim / kDepth<T>, scores, kMaxKeys, false,
                   nullptr},
                  here, padded / 16);
      for (int64_t i = 0; i < here; ++i) {
        const int64_t r = row + i, position = task.position + r / group;
        const int64_t from = std::max<int64_t>(0, a.first_key(position) - begin);
        const int64_t to = std::min(count, position + 1 - begin);
        float* dots = scores + i * kMaxKeys;
        const float shrink =
            fold_scores(score, dots, from, to, padded, weights + i * kMaxKeys, dots, state.top[r], state.mass[r]);
        if (shrink != 1.0f) scale_row(state.sums + r * dim, dim, shrink);
      }
      multiply<T>({weights, kMaxKeys, tile.values, tile.value_stride(), padded / kDepth<T>, state.sums + row * dim, dim,
                   true, nullptr},
                  here, dim / kBlockCols);
    }
  }
  return state;
}

template State attend_tile(const Attention<bf16>&, const Task&);
template State attend_tile(const Attention<float>&, const Task&);
template State attend_tile(const Attention<bf16, fp8>&, const Task&);
template State attend_tile(const Attention<float, fp8>&, const Task&);

}  // namespace starling
