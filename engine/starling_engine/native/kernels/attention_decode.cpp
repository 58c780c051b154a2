// A decode's query tokens, one and its drafts: bound by the speed of reading keys and values. So those are read once for
// all of the tokens, in the cache's layout, while the next ones are prefetched. (Blocks are scattered; the hardware cannot
// guess the next.) All KV heads of a block are neighbours, so a chunk of keys is computed for every head before the next
// chunk: memory is then read in long runs, which is 1.5 times as fast as head after head.
//
// Chunks begin at a multiple of 8 (see attention_chunk.h): in a windowed context some keys too early, whose scores are
// masked off. A cache of another type is converted first, chunk by chunk.
#include "attention_chunk.h"

namespace starling {
namespace {

// The query rows of one KV head, token by token and head by head within, and their part of the state.
template <typename T>
struct QueryRows {
  const T* q;
  State state;
  int64_t tokens, group, dim;
  float* scores;  // [tokens * group][kMaxChunk]
  T* weights;     // the same

  // Calls f(pass, first row, whether there is a second) for two rows at a time.
  template <typename F>
  void each_pair(F f) const {
    for (int64_t pass = 0, r = 0; r < tokens * group; ++pass, r += 2) f(pass, r, r + 1 < tokens * group);
  }

  // Adds a chunk, of which token t sees the keys seen[t], and prefetches the next one.
  template <typename K>
  void attend(const Scoring& score, const Chunk<K>& chunk, const Chunk<K>& next, int64_t values_at, const Span* seen) {
    const int64_t passes = (tokens * group + 1) / 2, padded = (chunk.count + 15) / 16 * 16;
    each_pair([&](int64_t pass, int64_t r, bool two) {
      const auto run = two ? score_chunk<T, K, 2> : score_chunk<T, K, 1>;
      run(q + r * dim, chunk, dim, values_at, {8 * pass / passes, 8 * (pass + 1) / passes}, scores + r * kMaxChunk);
    });
    for (int64_t t = 0, r = 0; t < tokens; ++t)
      for (int64_t g = 0; g < group; ++g, ++r) {
        float* dots = scores + r * kMaxChunk;
        const float shrink = fold_scores(score, dots, seen[t].begin, seen[t].end, padded, weights + r * kMaxChunk, dots,
                                         state.top[r], state.mass[r]);
        if (shrink != 1.0f) scale_row(state.sums + r * dim, dim, shrink);
      }
    each_pair([&](int64_t pass, int64_t r, bool two) {
      const auto run = two ? add_all_values<T, K, 2> : add_all_values<T, K, 1>;
      run(chunk, dim, values_at, weights + r * kMaxChunk, state.sums + r * dim, next, static_cast<int>(pass),
          static_cast<int>(passes));
    });
  }
};

}  // namespace

template <typename T, typename C>
State attend_decode(const Attention<T, C>& a, const Task& task) {
  using O = Operand<T>;
  constexpr bool kPacked = !std::is_same_v<C, T>;
  const int64_t group = a.group(), dim = a.dim, rows = task.tokens * group, head_size = a.block_size * a.row();
  Scratch& scratch = Scratch::mine();
  scratch.reset(State::bytes(task.rows(group), dim) + Scratch::padded<O>(task.rows(group) * dim) +
                Scratch::padded<float>(rows * kMaxChunk) + Scratch::padded<O>(rows * kMaxChunk) +
                (kPacked ? Scratch::padded<O>(Unpacked<O>::elements(dim)) : 0));
  const State state = State::fresh(scratch, task.rows(group), dim);
  O* queries = scratch.take<O>(task.rows(group) * dim);
  float* scores = scratch.take<float>(rows * kMaxChunk);
  O* weights = scratch.take<O>(rows * kMaxChunk);
  const Unpacked<O> unpacked{kPacked ? scratch.take<O>(Unpacked<O>::elements(dim)) : nullptr, dim};
  gather_queries(a, task, queries);

  const Scoring score(a.scale, a.soft_cap);
  const int64_t start = task.key_begin / 8 * 8, keys = chunk_keys(a), values_at = values_after(a);
  Span seen[kMaxDecodeTokens];
  Chunk<C> first_head(a, task, start);
  for (int64_t begin = start; begin < task.key_end; begin += keys) {
    const Chunk<C> next_keys(a, task, begin + keys);
    for (int64_t t = 0, position = task.position; t < task.tokens; ++t, ++position)
      seen[t] = {std::max(task.key_begin, a.first_key(position)) - begin, std::min(task.key_end, position + 1) - begin};
    Chunk<C> chunk = first_head;
    for (int64_t h = 0; h < task.kv_heads; ++h) {
      const Chunk<C> next = h + 1 < task.kv_heads ? chunk.moved(head_size) : next_keys;
      QueryRows<O> of_head{queries + h * rows * dim, state.from(h * rows, dim), task.tokens, group, dim, scores, weights};
      if constexpr (kPacked)
        of_head.attend(score, unpacked.take(chunk, next, values_at), Chunk<O>(), Unpacked<O>::values_after(dim), seen);
      else
        of_head.attend(score, chunk, next, values_at, seen);
      chunk = next;
    }
    first_head = next_keys;
  }
  return state;
}

template State attend_decode(const Attention<bf16>&, const Task&);
template State attend_decode(const Attention<float>&, const Task&);
template State attend_decode(const Attention<bf16, fp8>&, const Task&);
template State attend_decode(const Attention<float, fp8>&, const Task&);
template State attend_decode(const Attention<bf16, int8_code>&, const Task&);
template State attend_decode(const Attention<bf16, int4_pair>&, const Task&);
template State attend_decode(const Attention<float, int8_code>&, const Task&);
template State attend_decode(const Attention<float, int4_pair>&, const Task&);

}  // namespace starling
