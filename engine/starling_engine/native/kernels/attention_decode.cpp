// One query token: bound by the speed at which keys and values can be read, so they are used as they lie in the
// cache, while the next ones are being fetched. (Blocks are scattered; the hardware cannot guess the next.)
#include <algorithm>

#include "attention.h"

namespace starling {
namespace {

constexpr int64_t kChunk = 64;  // keys whose scores are worked out before their values are read

// Lane i of the result is the sum of the lanes of v[i].
inline __m512 sum_each(__m512 (&v)[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(v[2 * i]), y = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xDD));
  return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD));
}

// One 64-byte line of q times one of k, added to 16 partial sums. The mask keeps to the row's end.
inline __m512 dot_line(__m512 sum, const bf16* q, const bf16* k, __mmask16 words) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi32(words, q),
                          (__m512bh)_mm512_maskz_loadu_epi32(words, k));
}
inline __m512 dot_line(__m512 sum, const float* q, const float* k, __mmask16 words) {
  return _mm512_fmadd_ps(_mm512_maskz_loadu_ps(words, q), _mm512_maskz_loadu_ps(words, k), sum);
}

template <typename T>
inline __m512 dot_16_keys(const T* q, const T* const* keys, int64_t dim) {
  constexpr int64_t step = 64 / sizeof(T);
  __m512 partial[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) partial[i] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += step) {
    const __mmask16 words = first_lanes((dim - d) * sizeof(T) / 4);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) partial[i] = dot_line(partial[i], q + d, keys[i] + d, words);
  }
  return sum_each(partial);
}

inline void fetch(const void* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch(static_cast<const char*>(row) + at, _MM_HINT_T0);
}

// sums[head][0..16 * BLOCKS) += weight[head][key] * value[key], for HEADS heads.
template <typename T, int HEADS, int BLOCKS>
inline void add_values(const T* const* keys, int64_t values_at, int64_t count, const float* weights, float* sums,
                       int64_t dim) {
  __m512 acc[HEADS][BLOCKS];
#pragma GCC unroll 2
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS; ++j) acc[h][j] = _mm512_loadu_ps(sums + h * dim + j * 16);
  for (int64_t key = 0; key < count; ++key) {
    const T* value = keys[key] + values_at;
    __m512 weight[HEADS];
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; ++h) weight[h] = _mm512_set1_ps(weights[h * kChunk + key]);
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS; ++j) {
      const __m512 v = load16(value + j * 16);
#pragma GCC unroll 2
      for (int h = 0; h < HEADS; ++h) acc[h][j] = _mm512_fmadd_ps(v, weight[h], acc[h][j]);
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS; ++j) _mm512_storeu_ps(sums + h * dim + j * 16, acc[h][j]);
}

template <typename T, int HEADS>
void add_all_blocks(const T* const* keys, int64_t values_at, int64_t count, const float* weights, float* sums,
                    int64_t dim) {
  int64_t d = 0;
  for (; d + 128 <= dim; d += 128)
    add_values<T, HEADS, 8>(keys, values_at + d, count, weights, sums + d, dim);
  if (d + 64 <= dim) {
    add_values<T, HEADS, 4>(keys, values_at + d, count, weights, sums + d, dim);
    d += 64;
  }
  for (; d < dim; d += 16) add_values<T, HEADS, 1>(keys, values_at + d, count, weights, sums + d, dim);
}

}  // namespace

template <typename T>
State attend_one_token(const Attention<T>& a, const Task& task) {
  const int64_t group = a.group(), dim = a.dim, values_at = values_after(a), row_bytes = dim * sizeof(T);
  Scratch& scratch = Scratch::mine();
  scratch.reset(Scratch::padded<float>(group * dim) + 2 * Scratch::padded<float>(group) +
                Scratch::padded<float>(group * kChunk));
  State state{scratch.take<float>(group * dim), scratch.take<float>(group), scratch.take<float>(group)};
  float* weights = scratch.take<float>(group * kChunk);
  std::fill_n(state.sums, group * dim, 0.0f);
  std::fill_n(state.top, group, kLowest);
  std::fill_n(state.mass, group, 0.0f);

  const T* q = a.q + (task.token * a.heads + task.kv_head * group) * dim;
  const Scoring score(a.scale, a.soft_cap);
  const T* rows[2][kChunk];
  key_rows(a, task, task.key_begin, std::min(task.key_begin + kChunk, task.key_end), rows[0]);
  int turn = 0;
  for (int64_t begin = task.key_begin; begin < task.key_end; begin += kChunk, turn ^= 1) {
    const int64_t count = std::min(kChunk, task.key_end - begin), padded = (count + 15) / 16 * 16;
    const T** keys = rows[turn];
    const T** next = rows[turn ^ 1];
    const int64_t next_count = std::min(kChunk, task.key_end - begin - count);
    key_rows(a, task, begin + count, begin + count + next_count, next);
    for (int64_t i = count; i < padded; ++i) keys[i] = keys[count - 1];  // their scores are masked off

    for (int64_t i = 0; i < padded; i += 16) {
      for (int64_t j = i; j < i + 16 && j < count; ++j) fetch(keys[j] + values_at, row_bytes);
      for (int64_t g = 0; g < group; ++g)
        _mm512_storeu_ps(weights + g * kChunk + i, dot_16_keys(q + g * dim, keys + i, dim));
    }
    for (int64_t g = 0; g < group; ++g) {
      float* mine = weights + g * kChunk;
      const float shrink = fold_scores(score, mine, 0, count, padded, mine, mine, state.top[g], state.mass[g]);
      if (shrink != 1.0f) scale_row(state.sums + g * dim, dim, shrink);
    }
    for (int64_t i = 0; i < next_count; ++i) fetch(next[i], row_bytes);
    int64_t g = 0;
    for (; g + 2 <= group; g += 2)
      add_all_blocks<T, 2>(keys, values_at, count, weights + g * kChunk, state.sums + g * dim, dim);
    if (g < group) add_all_blocks<T, 1>(keys, values_at, count, weights + g * kChunk, state.sums + g * dim, dim);
  }
  return state;
}

template State attend_one_token(const Attention<bf16>&, const Task&);
template State attend_one_token(const Attention<float>&, const Task&);

}  // namespace starling
