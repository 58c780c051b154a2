// One query token: bound by the speed of reading keys and values. So they are used in the cache's layout, while the next
// ones are prefetched. (Blocks are scattered; the hardware cannot guess the next.) All KV heads of a block are
// neighbours, so a chunk of keys is computed for every head before the next chunk: memory is then read in long runs,
// which is 1.5 times as fast as head after head.
//
// Chunks begin at a multiple of 8 (see attention_chunk.h): in a windowed context some keys too early, whose scores are
// masked off. A cache in fp8 is converted to T first, chunk by chunk.
#include "attention_chunk.h"

namespace starling {
namespace {

// The query heads of one KV head, and their part of the state.
template <typename T>
struct Group {
  const T* q;
  State state;
  int64_t size, dim;
  float* scores;  // [size][kMaxChunk]
  T* weights;     // the same

  // Calls f(pass, first head, whether there is a second) for two heads at a time.
  template <typename F>
  void each_pair(F f) const {
    for (int64_t pass = 0, g = 0; g < size; ++pass, g += 2) f(pass, g, g + 1 < size);
  }

  // Adds a chunk, whose first `hidden` keys are masked, and prefetches the next one.
  void attend(const Scoring& score, const Chunk<T>& chunk, const Chunk<T>& next, int64_t values_at, int64_t hidden) {
    const int64_t passes = (size + 1) / 2, padded = (chunk.count + 15) / 16 * 16;
    each_pair([&](int64_t pass, int64_t g, bool two) {
      const auto run = two ? score_chunk<T, 2> : score_chunk<T, 1>;
      run(q + g * dim, chunk, dim, values_at, {8 * pass / passes, 8 * (pass + 1) / passes}, scores + g * kMaxChunk);
    });
    for (int64_t g = 0; g < size; ++g) {
      float* dots = scores + g * kMaxChunk;
      const float shrink = fold_scores(score, dots, hidden, chunk.count, padded, weights + g * kMaxChunk, dots,
                                       state.top[g], state.mass[g]);
      if (shrink != 1.0f) scale_row(state.sums + g * dim, dim, shrink);
    }
    each_pair([&](int64_t pass, int64_t g, bool two) {
      const auto run = two ? add_all_values<T, 2> : add_all_values<T, 1>;
      run(chunk, dim, values_at, weights + g * kMaxChunk, state.sums + g * dim, next, static_cast<int>(pass),
          static_cast<int>(passes));
    });
  }
};

}  // namespace

template <typename T, typename C>
State attend_one_token(const Attention<T, C>& a, const Task& task) {
  constexpr bool kPacked = !std::is_same_v<T, C>;
  const int64_t group = a.group(), dim = a.dim, head_size = a.block_size * dim;
  Scratch& scratch = Scratch::mine();
  scratch.reset(State::bytes(task.rows(group), dim) + Scratch::padded<float>(group * kMaxChunk) +
                Scratch::padded<T>(group * kMaxChunk) + (kPacked ? Scratch::padded<T>(Unpacked<T>::elements(dim)) : 0));
  const State state = State::fresh(scratch, task.rows(group), dim);
  float* scores = scratch.take<float>(group * kMaxChunk);
  T* weights = scratch.take<T>(group * kMaxChunk);
  const Unpacked<T> unpacked{kPacked ? scratch.take<T>(Unpacked<T>::elements(dim)) : nullptr, dim};

  const T* q = a.q + (task.token * a.heads + task.kv_head * group) * dim;
  const Scoring score(a.scale, a.soft_cap);
  const int64_t start = task.key_begin / 8 * 8, keys = chunk_keys(a), values_at = values_after(a);
  Chunk<C> first_head(a, task, start);
  for (int64_t begin = start; begin < task.key_end; begin += keys) {
    const Chunk<C> next_keys(a, task, begin + keys);
    const int64_t hidden = std::max<int64_t>(0, task.key_begin - begin);
    Chunk<C> chunk = first_head;
    for (int64_t h = 0; h < task.kv_heads; ++h) {
      const Chunk<C> next = h + 1 < task.kv_heads ? chunk.moved(head_size) : next_keys;
      Group<T> heads{q + h * group * dim, state.from(h * group, dim), group, dim, scores, weights};
      if constexpr (kPacked)
        heads.attend(score, unpacked.take(chunk, next, values_at), {}, Unpacked<T>::values_after(dim), hidden);
      else
        heads.attend(score, chunk, next, values_at, hidden);
      chunk = next;
    }
    first_head = next_keys;
  }
  return state;
}

template State attend_one_token(const Attention<bf16>&, const Task&);
template State attend_one_token(const Attention<float>&, const Task&);
template State attend_one_token(const Attention<bf16, fp8>&, const Task&);
template State attend_one_token(const Attention<float, fp8>&, const Task&);

}  // namespace starling
