// Paged causal attention: the caller's arguments, the task of a thread, and its result.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cache_rows.h"
#include "parallel.h"

namespace starling {

// Below every real score, yet finite: exp2(lowest - lowest) is 1 and exp2(-inf - lowest) is 0, never NaN.
constexpr float kLowest = -1e30f;

// Query tokens times query heads of one KV head that a task computes at once.
constexpr int64_t kMaxQueryRows = 256;

// Query tokens of a decode: one, and its drafts.
constexpr int64_t kMaxDecodeTokens = 8;
// Query rows of one KV head, from 2 tokens on, up to which reading keys once is as fast as packing them.
constexpr int64_t kMaxDecodeRows = 64;

// C is what the cache holds: T, fp8, or rows with scales. It is computed in Operand<T>.
template <typename T, typename C = T>
struct Attention {
  const T* q;   // [tokens][heads][dim]
  const C* kv;  // blocks of [2][kv_heads][block_size][row_size]
  int64_t block_stride;  // elements from one block to the next
  const int32_t* block_tables;
  int64_t max_blocks;
  int64_t heads, kv_heads, dim, block_size;
  float scale;        // of the products of queries and cached keys
  float value_scale;  // of cached values
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
  const float* sinks;  // [heads]: scores of keys without a value; null: none
  T* out;  // as q

  int64_t group() const { return heads / kv_heads; }
  int64_t row() const { return row_size<C>(dim); }
  bool is_decode(int64_t tokens) const {
    return tokens == 1 || (tokens > 1 && tokens <= kMaxDecodeTokens && tokens * group() <= kMaxDecodeRows);
  }
  int64_t first_key(int64_t position) const {
    return window > 0 && position >= window ? position - window + 1 : 0;
  }
};

// Some query tokens of one sequence, the query heads of some KV heads, and a range of the keys.
struct Task {
  int64_t sequence;
  int64_t kv_head, kv_heads;  // the first, and how many
  int64_t token, tokens;      // rows of q
  int64_t position;           // of the first of them in its sequence
  int64_t key_begin, key_end;
  int64_t part;  // index for the partial sums where other tasks share these tokens; -1: none do

  // Rows of the state: KV head by KV head, token by token, query head by query head.
  int64_t rows(int64_t group) const { return kv_heads * tokens * group; }
};

// Online softmax over the keys seen so far.
struct State {
  float* sums;  // [rows][dim]: values weighted by exp2(score - top)
  float* top;   // [rows]: the largest score, in units of log2
  float* mass;  // [rows]: the weights' sum

  static size_t bytes(int64_t rows, int64_t dim) {
    return Scratch::padded<float>(rows * dim) + 2 * Scratch::padded<float>(rows);
  }

  // No key seen yet.
  static State fresh(Scratch& scratch, int64_t rows, int64_t dim) {
    State state{scratch.take<float>(rows * dim), scratch.take<float>(rows), scratch.take<float>(rows)};
    std::fill_n(state.sums, rows * dim, 0.0f);
    std::fill_n(state.top, rows, kLowest);
    std::fill_n(state.mass, rows, 0.0f);
    return state;
  }

  State from(int64_t row, int64_t dim) const { return {sums + row * dim, top + row, mass + row}; }
};

// Address of a key; its value is values_after elements behind it. Rows of a block follow one another.
template <typename T, typename C>
inline const C* key_row(const Attention<T, C>& a, const Task& task, int64_t key) {
  const uint32_t size = static_cast<uint32_t>(a.block_size), at = static_cast<uint32_t>(key);
  const int64_t block = a.block_tables[task.sequence * a.max_blocks + at / size];
  return a.kv + block * a.block_stride + (task.kv_head * a.block_size + at % size) * a.row();
}

// Copies the task's queries in the order of its state's rows.
template <typename T, typename C>
inline void gather_queries(const Attention<T, C>& a, const Task& task, Operand<T>* out) {
  const int64_t size = a.group() * a.dim;
  for (int64_t h = 0; h < task.kv_heads; ++h)
    for (int64_t t = 0; t < task.tokens; ++t, out += size)
      unpack(a.q + (task.token + t) * a.heads * a.dim + (task.kv_head + h) * size, size, out);
}

template <typename T, typename C>
inline int64_t values_after(const Attention<T, C>& a) {
  return a.kv_heads * a.block_size * a.row();
}

// Raw dot products to scores in units of log2: soft_cap * tanh(scale * x / soft_cap), or scale * x.
struct Scoring {
  Floats scale, cap;
  bool capped;

  Scoring(float scale_by, float soft_cap)
      : scale(splat16(soft_cap > 0 ? 2 * kLog2E * scale_by / soft_cap : scale_by * kLog2E)),
        cap(splat16(soft_cap * kLog2E)),
        capped(soft_cap > 0) {}

  Floats operator()(Floats dot) const {
    const Floats x = dot * scale;
    if (!capped) return x;
    // tanh(y) = 1 - 2 / (exp(2y) + 1); exp2 has 2y in units of log2 already.
    const Floats one = splat16(1.0f);
    return cap * (one - splat16(2.0f) / (exp2(x) + one));
  }
};

inline float exp2_one(float x) {
  float lanes[kLanes];
  store(lanes, exp2(splat(x)));
  return lanes[0];
}

// Adds one row's scores, those in [begin, end), to its state and writes the weights to `weights`: zeros outside that
// range, up to `padded` (a multiple of 16). `dots`, `staged` and `weights` may be the same memory. Returns the factor
// for the row's earlier sums.
template <typename W>
inline float fold_scores(const Scoring& score, const float* dots, int64_t begin, int64_t end, int64_t padded,
                         W* weights, float* staged, float& top, float& mass) {
  const Floats nothing = splat16(-std::numeric_limits<float>::infinity());
  Floats tops = splat16(top);
  for (int64_t j = 0; j < padded; j += 16) {
    Floats s = score(load16(dots + j));
    if (j < begin || j + 16 > end) {
      const Lanes seen = first_lanes(end > j ? end - j : 0) & ~first_lanes(begin > j ? begin - j : 0);
      s = choose(seen, s, nothing);
    }
    tops = highest(tops, s);
    store16(staged + j, s);
  }
  const float new_top = highest_of(tops);
  tops = splat16(new_top);
  Floats added = splat16(0.0f);
  for (int64_t j = 0; j < padded; j += 16) {
    const Floats w = exp2(load16(staged + j) - tops);
    added = added + w;
    store16(weights + j, w);
  }
  const float shrink = new_top == top ? 1.0f : exp2_one(top - new_top);
  mass = mass * shrink + sum_of(added);
  top = new_top;
  return shrink;
}

inline void scale_row(float* row, int64_t dim, float by) {
  for (int64_t d = 0; d < dim; d += 16) store16(row + d, load16(row + d) * splat16(by));
}

// Two ways to compute a task. Both leave its state in the thread's scratch memory, valid until the next task.
template <typename T, typename C>
State attend_decode(const Attention<T, C>& a, const Task& task);  // reads each key once, in the cache's layout
template <typename T, typename C>
State attend_tile(const Attention<T, C>& a, const Task& task);  // packs keys into matrix tiles first

}  // namespace starling
