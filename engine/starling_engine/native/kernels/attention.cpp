// Paged causal attention over a batch that mixes decodes, of a token and perhaps some drafts, and long chunks. It is cut into
// tasks, free threads take the next task, and parts of a split context are combined at the end.
#include "attention.h"
#include "replay.h"

#include <algorithm>
#include <vector>

namespace starling {
namespace {

// Splitting a context costs a pass over its parts. It pays only when threads would be idle.
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kMinSplitKeys = 256;

// Parts [first, first + count) of the same query rows.
struct Split {
  Task task;
  int64_t first, count;
};

template <typename T, typename C>
class Plan {
 public:
  std::vector<Task> tasks;
  std::vector<Split> splits;
  int64_t parts = 0;
  int64_t heads_each = 1;  // KV heads that a decode's task has
  int64_t most_tokens = 0;  // query tokens of a decode

  Plan(const Attention<T, C>& attention, const int32_t* query_start, const int32_t* context_lens, int64_t sequences,
       int threads)
      : a(attention) {
    const auto tokens_of = [&](int64_t s) { return query_start[s + 1] - query_start[s]; };
    // Long chunks come first; decodes then fill the gaps at the end.
    int64_t decodes = 0;
    for (int64_t s = 0; s < sequences; ++s)
      if (a.is_decode(tokens_of(s)))
        ++decodes, most_tokens = std::max<int64_t>(most_tokens, tokens_of(s));
      else
        add_chunk(s, query_start[s], tokens_of(s), context_lens[s]);
    if (decodes == 0) return;
    // Enough tasks for all threads, with as many heads and as many keys each as possible.
    const int64_t wanted = threads == 1 ? 1 : ceil_div(kTasksPerThread * threads, decodes);
    heads_each = std::max<int64_t>(1, a.kv_heads / wanted);
    const int64_t pieces = ceil_div(wanted, ceil_div(a.kv_heads, heads_each));
    for (int64_t s = 0; s < sequences; ++s)
      if (a.is_decode(tokens_of(s))) add_decode(s, query_start[s], tokens_of(s), context_lens[s], pieces);
  }

 private:
  const Attention<T, C>& a;

  void add_chunk(int64_t sequence, int64_t start, int64_t count, int64_t context) {
    const int64_t step = std::max<int64_t>(1, kMaxQueryRows / a.group());
    for (int64_t head = 0; head < a.kv_heads; ++head)
      for (int64_t tile = ceil_div(count, step) - 1; tile >= 0; --tile) {  // the last tile sees the most keys, so it comes first
        const int64_t offset = tile * step, tokens = std::min(step, count - offset);
        const int64_t position = context - count + offset;
        tasks.push_back(
            {sequence, head, 1, start + offset, tokens, position, a.first_key(position), position + tokens, -1});
      }
  }

  void add_decode(int64_t sequence, int64_t start, int64_t tokens, int64_t context, int64_t pieces) {
    const int64_t position = context - tokens, begin = a.first_key(position);
    const int64_t step = std::max(kMinSplitKeys, ceil_div(ceil_div(context - begin, pieces), a.block_size) * a.block_size);
    const int64_t count = ceil_div(context - begin, step);
    for (int64_t head = 0; head < a.kv_heads; head += heads_each) {
      const int64_t heads = std::min(heads_each, a.kv_heads - head);
      Task task{sequence, head, heads, start, tokens, position, begin, context, -1};
      if (count == 1) {
        tasks.push_back(task);
        continue;
      }
      splits.push_back({task, parts, count});
      for (; task.key_begin < context; task.key_begin += step) {
        task.key_end = std::min(context, task.key_begin + step);
        task.part = parts++;
        tasks.push_back(task);
      }
    }
  }
};

// What a row's sums are multiplied by. A sink is one more score, whose value is 0: it comes in here, where a row is whole.
template <typename T, typename C>
float share_of_sums(const Attention<T, C>& a, int64_t head, float top, float mass) {
  if (a.sinks == nullptr) return a.value_scale / mass;
  const float sink = a.sinks[head] * kLog2E, new_top = std::max(top, sink);
  const float shrink = exp2_one(top - new_top);
  return a.value_scale * shrink / (mass * shrink + exp2_one(sink - new_top));
}

template <typename T, typename C>
void write_out(const Attention<T, C>& a, const Task& task, const State& state) {
  const int64_t group = a.group();
  for (int64_t r = 0; r < task.rows(group); ++r) {
    const int64_t token = task.token + r / group % task.tokens, kv_head = task.kv_head + r / group / task.tokens;
    const int64_t head = kv_head * group + r % group;
    T* out = a.out + (token * a.heads + head) * a.dim;
    const Floats share = splat16(share_of_sums(a, head, state.top[r], state.mass[r]));
    for (int64_t d = 0; d < a.dim; d += 16) store16(out + d, load16(state.sums + r * a.dim + d) * share);
  }
}

// Partial sums of split tasks.
class Parts {
 public:
  Parts(int64_t parts, int64_t max_rows, int64_t dim) : max_rows_(max_rows), dim_(dim), data_(parts * size()) {}

  void save(int64_t part, const State& state, int64_t rows) {
    const State mine = at(part);
    std::copy_n(state.sums, rows * dim_, mine.sums);
    std::copy_n(state.top, rows, mine.top);
    std::copy_n(state.mass, rows, mine.mass);
  }

  // Folds all parts of a split into its first.
  State combine(const Split& split, int64_t rows) {
    const State total = at(split.first);
    for (int64_t part = split.first + 1; part < split.first + split.count; ++part)
      for (int64_t r = 0; r < rows; ++r) {
        const State other = at(part);
        const float top = std::max(total.top[r], other.top[r]);
        const float ours = exp2_one(total.top[r] - top), theirs = exp2_one(other.top[r] - top);
        for (int64_t d = r * dim_; d < (r + 1) * dim_; ++d) total.sums[d] = total.sums[d] * ours + other.sums[d] * theirs;
        total.mass[r] = total.mass[r] * ours + other.mass[r] * theirs;
        total.top[r] = top;
      }
    return total;
  }

 private:
  State at(int64_t part) {
    float* data = data_.data() + part * size();
    return {data, data + max_rows_ * dim_, data + max_rows_ * (dim_ + 1)};
  }
  int64_t size() const { return max_rows_ * (dim_ + 2); }

  int64_t max_rows_, dim_;
  std::vector<float> data_;
};

template <typename T, typename C>
void attend(const Attention<T, C>& a, const int32_t* query_start, const int32_t* context_lens, int64_t sequences,
            int threads) {
  const Plan<T, C> plan(a, query_start, context_lens, sequences, threads);
  const int64_t tasks = static_cast<int64_t>(plan.tasks.size()), splits = static_cast<int64_t>(plan.splits.size());
  const int64_t group = a.group();
  Parts parts(plan.parts, plan.heads_each * plan.most_tokens * group, a.dim);
  each_in_turn(tasks, static_cast<int>(std::min<int64_t>(threads, tasks)), [&](int64_t i) {
    const Task& task = plan.tasks[i];
    const State state = a.is_decode(task.tokens) ? attend_decode(a, task) : attend_tile(a, task);
    if (task.part < 0)
      write_out(a, task, state);
    else
      parts.save(task.part, state, task.rows(group));
  });
  parallel_for(splits, static_cast<int>(std::min<int64_t>(threads, splits)), [&](int64_t i) {
    const Task& task = plan.splits[i].task;
    write_out(a, task, parts.combine(plan.splits[i], task.rows(group)));
  });
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// Sequence s has the query rows [query_start[s], query_start[s + 1]), the last of its context_lens[s] tokens.
// `cache` is the kind of the cache; keys and values of one in fp8 are multiplied by key_scale and value_scale.
// block_stride is in elements of the cache. block_tables [sequences][max_blocks]; dim a multiple of 16, at most 512; sinks [heads]
// or null.
void starling_paged_attention(const void* q, const void* kv, int64_t block_stride, const int32_t* block_tables,
                              int64_t max_blocks, const int32_t* query_start, const int32_t* context_lens,
                              int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, float scale,
                              int64_t window, float soft_cap, float key_scale, float value_scale, const float* sinks,
                              void* out, int fp32, int cache, int threads) {
  with_types(fp32, cache, [&](auto type, auto cached) {
    using T = decltype(type);
    using C = decltype(cached);
    attend(Attention<T, C>{static_cast<const T*>(q), static_cast<const C*>(kv), block_stride, block_tables,
                           max_blocks, heads, kv_heads, dim, block_size, scale * key_scale, value_scale, window, soft_cap, sinks,
                           static_cast<T*>(out)},
           query_start, context_lens, sequences, threads);
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_paged_attention)
