// One query token: bound by the speed at which keys and values can be read, so they are used as they lie in the
// cache, while the next ones are being fetched. (Blocks are scattered; the hardware cannot guess the next.) All the
// KV heads of a block lie together, so a chunk of keys is worked off for every head before the next one's turn: that
// reads memory in long runs, which is half as fast again as head after head.
//
// The unit is an octet: 8 keys whose rows follow one another, as block sizes are multiples of 8. It takes the first
// keys of a windowed context down to a multiple of 8; their scores are masked off.
#include <algorithm>
#include <type_traits>

#include "attention.h"

namespace starling {
namespace {

// Keys whose scores are worked out before their values are read: 8 KB of them, which is as far ahead as it pays to
// fetch (measured), though at least enough to fill a register with scores.
constexpr int64_t kMaxChunk = 64;
constexpr int64_t kOctets = kMaxChunk / 8;

template <typename T>
int64_t chunk_keys(int64_t dim) {
  return std::clamp<int64_t>(8192 / (dim * sizeof(T)) / 16 * 16, 16, kMaxChunk);
}

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

inline __m512 dot_line(__m512 sum, __m512i q, __m512i k, bf16) {
  return _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)k);
}
inline __m512 dot_line(__m512 sum, __m512i q, __m512i k, float) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(q), _mm512_castsi512_ps(k), sum);
}

inline void fetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T0); }

// Dot products of two heads with an octet (HEADS 2), or of one head with two octets (HEADS 1): head by head, octet by
// octet. `rows_ahead` rows of `ahead` are fetched along the way: in order, which the hardware helps with, and a few
// lines at a time, since requests in a burst find no room in the core's queue and are dropped.
template <typename T, int HEADS>
inline __m512 dots(const T* q, const T* const* octets, int64_t dim, const T* ahead, int64_t rows_ahead) {
  constexpr int OCTETS = 2 / HEADS;
  __m512 partial[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) partial[i] = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += kLine<T>) {
    const __mmask16 words = first_lanes((dim - d) * sizeof(T) / 4);
    for (int64_t i = 0; i < rows_ahead; ++i, ahead += kLine<T>) fetch(ahead);
    __m512i query[HEADS];
#pragma GCC unroll 2
    for (int h = 0; h < HEADS; ++h) query[h] = _mm512_maskz_loadu_epi32(words, q + h * dim + d);
#pragma GCC unroll 2
    for (int o = 0; o < OCTETS; ++o)
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        const __m512i key = _mm512_maskz_loadu_epi32(words, octets[o] + i * dim + d);
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; ++h) {
          __m512& sum = partial[(h * OCTETS + o) * 8 + i];
          sum = dot_line(sum, query[h], key, T{});
        }
      }
  }
  return sum_each(partial);
}

// A run of keys of one sequence and head.
template <typename T>
struct Chunk {
  const T* octets[kOctets + 1];  // one more, so that octets can be taken by twos
  int64_t count = 0;  // at most chunk_keys

  // The keys from `begin`, a multiple of 8, to the task's last or as many as fit; of the task's first head.
  Chunk(const Attention<T>& a, const Task& task, int64_t begin)
      : count(std::clamp<int64_t>(task.key_end - begin, 0, chunk_keys<T>(a.dim))) {
    int64_t i = 0;
    for (; i * 8 < count; ++i) octets[i] = key_row(a, task, begin + i * 8);
    octets[i] = i > 0 ? octets[i - 1] : nullptr;
  }
  Chunk() = default;

  // The same keys, `elements` further: of another head.
  Chunk moved(int64_t elements) const {
    Chunk other = *this;
    for (const T*& octet : other.octets) octet += elements;
    return other;
  }

  int64_t octet_count() const { return (count + 7) / 8; }
};

// weights[head][key] = q[head] . key, for HEADS heads; the values' lines are fetched meanwhile, this pass's share.
template <typename T, int HEADS>
void score_chunk(const T* q, const Chunk<T>& chunk, int64_t dim, int64_t values_at, Span share, float* weights) {
  for (int64_t o = 0; o < chunk.octet_count(); o += 2 / HEADS) {
    const T* ahead = chunk.octets[o] + values_at + share.begin * dim;
    const __m512 sums = dots<T, HEADS>(q, chunk.octets + o, dim, ahead, share.end - share.begin);
    if (HEADS == 1) {
      _mm512_storeu_ps(weights + o * 8, sums);
      for (int64_t i = 0; i < 8 && o + 1 < chunk.octet_count(); ++i)
        for (int64_t d = 0; d < dim; d += kLine<T>) fetch(chunk.octets[o + 1] + values_at + i * dim + d);
    } else {
      _mm256_storeu_ps(weights + o * 8, _mm512_castps512_ps256(sums));
      _mm256_storeu_ps(weights + kMaxChunk + o * 8, _mm512_extractf32x8_ps(sums, 1));
    }
  }
}

// sums[head][0..16 * BLOCKS) += weights[head][key] * value[key], for HEADS heads. Of the chunk to come, the keys that
// are `pass` modulo `passes` are fetched.
template <typename T, int HEADS, int BLOCKS>
void add_values(const Chunk<T>& chunk, int64_t dim, int64_t values_at, const float* weights, float* sums,
                const Chunk<T>& next, int64_t pass, int64_t passes) {
  __m512 acc[HEADS][BLOCKS];
#pragma GCC unroll 2
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS; ++j) acc[h][j] = _mm512_loadu_ps(sums + h * dim + j * 16);
  for (int64_t o = 0; o * 8 < chunk.count; ++o) {
    const T* value = chunk.octets[o] + values_at;
    const int64_t keys = std::min<int64_t>(8, chunk.count - o * 8);
    for (int64_t i = 0; i < keys; ++i, value += dim) {
      const int64_t key = o * 8 + i;
      if (key < next.count && key % passes == pass)
        for (int64_t d = 0; d < dim; d += kLine<T>) fetch(next.octets[o] + i * dim + d);
      __m512 weight[HEADS];
#pragma GCC unroll 2
      for (int h = 0; h < HEADS; ++h) weight[h] = _mm512_set1_ps(weights[h * kMaxChunk + key]);
#pragma GCC unroll 8
      for (int j = 0; j < BLOCKS; ++j) {
        const __m512 v = load16(value + j * 16);
#pragma GCC unroll 2
        for (int h = 0; h < HEADS; ++h) acc[h][j] = _mm512_fmadd_ps(v, weight[h], acc[h][j]);
      }
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 8
    for (int j = 0; j < BLOCKS; ++j) _mm512_storeu_ps(sums + h * dim + j * 16, acc[h][j]);
}

// All columns of the sums, as many at a time as there are registers for.
template <typename T, int HEADS>
void add_all_values(const Chunk<T>& chunk, int64_t dim, int64_t values_at, const float* weights, float* sums,
                    const Chunk<T>& next, int64_t pass, int64_t passes) {
  for (int64_t d = 0; d < dim;) {
    const auto add = [&](auto blocks) {
      static const Chunk<T> none{};
      add_values<T, HEADS, blocks>(chunk, dim, values_at + d, weights, sums + d, d == 0 ? next : none, pass, passes);
      d += 16 * blocks;
    };
    if (d + 128 <= dim)
      add(std::integral_constant<int, 8>());
    else if (d + 64 <= dim)
      add(std::integral_constant<int, 4>());
    else
      add(std::integral_constant<int, 1>());
  }
}

// The query heads of one KV head, and their part of the state.
template <typename T>
struct Group {
  const T* q;
  State state;
  int64_t size, dim;
  float* weights;  // [size][kMaxChunk]

  // Two heads at a time: f(pass, first head, whether there is a second).
  template <typename F>
  void by_twos(F f) const {
    for (int64_t pass = 0, g = 0; g < size; ++pass, g += 2) f(pass, g, g + 1 < size);
  }

  // Folds in a chunk, whose first `hidden` keys are not to be seen, and fetches the next.
  void attend(const Scoring& score, const Chunk<T>& chunk, const Chunk<T>& next, int64_t values_at, int64_t hidden) {
    const int64_t passes = (size + 1) / 2, padded = (chunk.count + 15) / 16 * 16;
    by_twos([&](int64_t pass, int64_t g, bool two) {
      const auto run = two ? score_chunk<T, 2> : score_chunk<T, 1>;
      run(q + g * dim, chunk, dim, values_at, {8 * pass / passes, 8 * (pass + 1) / passes}, weights + g * kMaxChunk);
    });
    for (int64_t g = 0; g < size; ++g) {
      float* mine = weights + g * kMaxChunk;
      const float shrink =
          fold_scores(score, mine, hidden, chunk.count, padded, mine, mine, state.top[g], state.mass[g]);
      if (shrink != 1.0f) scale_row(state.sums + g * dim, dim, shrink);
    }
    by_twos([&](int64_t pass, int64_t g, bool two) {
      const auto run = two ? add_all_values<T, 2> : add_all_values<T, 1>;
      run(chunk, dim, values_at, weights + g * kMaxChunk, state.sums + g * dim, next, pass, passes);
    });
  }
};

}  // namespace

template <typename T>
State attend_one_token(const Attention<T>& a, const Task& task) {
  const int64_t group = a.group(), dim = a.dim, head_size = a.block_size * dim;
  Scratch& scratch = Scratch::mine();
  scratch.reset(State::bytes(task.rows(group), dim) + Scratch::padded<float>(group * kMaxChunk));
  const State state = State::fresh(scratch, task.rows(group), dim);
  float* weights = scratch.take<float>(group * kMaxChunk);

  const T* q = a.q + (task.token * a.heads + task.kv_head * group) * dim;
  const Scoring score(a.scale, a.soft_cap);
  const int64_t start = task.key_begin / 8 * 8, keys = chunk_keys<T>(dim);
  Chunk<T> first_head(a, task, start);
  for (int64_t begin = start; begin < task.key_end; begin += keys) {
    const Chunk<T> next_keys(a, task, begin + keys);
    Chunk<T> chunk = first_head;
    for (int64_t h = 0; h < task.kv_heads; ++h) {
      const Chunk<T> next = h + 1 < task.kv_heads ? chunk.moved(head_size) : next_keys;
      Group<T> heads{q + h * group * dim, state.from(h * group, dim), group, dim, weights};
      heads.attend(score, chunk, next, a.kv_heads * head_size, std::max<int64_t>(0, task.key_begin - begin));
      chunk = next;
    }
    first_head = next_keys;
  }
  return state;
}

template State attend_one_token(const Attention<bf16>&, const Task&);
template State attend_one_token(const Attention<float>&, const Task&);

}  // namespace starling
