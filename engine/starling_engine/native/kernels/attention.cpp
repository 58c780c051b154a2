// Paged causal attention over a batch that mixes single tokens and long chunks: cut into tasks, worked off by
// whichever thread is free, unfinished parts put together at the end.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace starling {
namespace {

// Splitting a context costs a pass over its parts; worth it only when threads would have nothing to do.
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kMinSplitKeys = 256;
// Up to this many query heads per KV head, a single token's keys are read as they lie; above, packing them pays.
constexpr int64_t kMaxDirectGroup = 8;

// Parts [first, first + count) of the same query rows.
struct Split {
  Task task;
  int64_t first, count;
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<Split> splits;
  int64_t parts = 0;

  template <typename T>
  Plan(const Attention<T>& a, const int32_t* query_start, const int32_t* context_lens, int64_t sequences, int threads) {
    // Long chunks first, the single tokens then fill the gaps that are left at the end.
    for (int64_t s = 0; s < sequences; ++s)
      if (query_start[s + 1] - query_start[s] > 1)
        add_chunk(a, s, query_start[s], query_start[s + 1] - query_start[s], context_lens[s]);
    const int64_t singles =
        std::count_if(query_start, query_start + sequences, [](const int32_t& q) { return (&q)[1] - q == 1; });
    const int64_t wanted = kTasksPerThread * threads - static_cast<int64_t>(tasks.size());
    const int64_t splits_each = threads > 1 && singles > 0 ? ceil_div(wanted, singles * a.kv_heads) : 1;
    for (int64_t s = 0; s < sequences; ++s)
      if (query_start[s + 1] - query_start[s] == 1)
        add_single(a, s, query_start[s], context_lens[s], std::max<int64_t>(1, splits_each));
  }

 private:
  template <typename T>
  void add_chunk(const Attention<T>& a, int64_t sequence, int64_t start, int64_t count, int64_t context) {
    const int64_t step = std::max<int64_t>(1, kMaxQueryRows / a.group());
    for (int64_t head = 0; head < a.kv_heads; ++head)
      for (int64_t tile = ceil_div(count, step) - 1; tile >= 0; --tile) {  // the last sees most keys: first
        const int64_t offset = tile * step, tokens = std::min(step, count - offset);
        const int64_t position = context - count + offset;
        tasks.push_back({sequence, head, start + offset, tokens, position, a.first_key(position), position + tokens, -1});
      }
  }

  template <typename T>
  void add_single(const Attention<T>& a, int64_t sequence, int64_t token, int64_t context, int64_t splits_each) {
    const int64_t begin = a.first_key(context - 1);
    const int64_t step =
        std::max(kMinSplitKeys, ceil_div(ceil_div(context - begin, splits_each), a.block_size) * a.block_size);
    const int64_t count = ceil_div(context - begin, step);
    for (int64_t head = 0; head < a.kv_heads; ++head) {
      Task task{sequence, head, token, 1, context - 1, begin, context, -1};
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

template <typename T>
void write_out(const Attention<T>& a, const Task& task, const State& state) {
  const int64_t group = a.group();
  for (int64_t r = 0; r < task.tokens * group; ++r) {
    T* out = a.out + ((task.token + r / group) * a.heads + task.kv_head * group + r % group) * a.dim;
    const __m512 share = _mm512_set1_ps(1.0f / state.mass[r]);
    for (int64_t d = 0; d < a.dim; d += 16)
      store16(out + d, _mm512_mul_ps(_mm512_loadu_ps(state.sums + r * a.dim + d), share));
  }
}

// The unfinished sums of split tasks: for each part [group][dim], [group], [group].
class Parts {
 public:
  Parts(int64_t parts, int64_t group, int64_t dim) : group_(group), dim_(dim), data_(parts * size()) {}

  State at(int64_t part) {
    float* data = data_.data() + part * size();
    return {data, data + group_ * dim_, data + group_ * (dim_ + 1)};
  }

  void keep(int64_t part, const State& state) {
    const State mine = at(part);
    std::copy_n(state.sums, group_ * dim_, mine.sums);
    std::copy_n(state.top, group_, mine.top);
    std::copy_n(state.mass, group_, mine.mass);
  }

  // Folds all parts of a split into its first.
  State combine(const Split& split) {
    const State total = at(split.first);
    for (int64_t part = split.first + 1; part < split.first + split.count; ++part)
      for (int64_t g = 0; g < group_; ++g) {
        const State other = at(part);
        const float top = std::max(total.top[g], other.top[g]);
        const float ours = exp2_one(total.top[g] - top), theirs = exp2_one(other.top[g] - top);
        for (int64_t d = g * dim_; d < (g + 1) * dim_; ++d) total.sums[d] = total.sums[d] * ours + other.sums[d] * theirs;
        total.mass[g] = total.mass[g] * ours + other.mass[g] * theirs;
        total.top[g] = top;
      }
    return total;
  }

 private:
  int64_t size() const { return group_ * (dim_ + 2); }

  int64_t group_, dim_;
  std::vector<float> data_;
};

template <typename T>
void attend(const Attention<T>& a, const int32_t* query_start, const int32_t* context_lens, int64_t sequences,
            int threads) {
  const Plan plan(a, query_start, context_lens, sequences, threads);
  const int64_t tasks = static_cast<int64_t>(plan.tasks.size()), splits = static_cast<int64_t>(plan.splits.size());
  Parts parts(plan.parts, a.group(), a.dim);
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const Task& task = plan.tasks[i];
      const bool direct = task.tokens == 1 && a.group() <= kMaxDirectGroup;
      const State state = direct ? attend_one_token(a, task) : attend_tile(a, task);
      if (task.part < 0)
        write_out(a, task, state);
      else
        parts.keep(task.part, state);
    }
    if (splits > 0) {
#pragma omp barrier
#pragma omp for
      for (int64_t i = 0; i < splits; ++i) write_out(a, plan.splits[i].task, parts.combine(plan.splits[i]));
    }
  }
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// Sequence s owns the query rows [query_start[s], query_start[s + 1]), the last of its context_lens[s] tokens.
// block_tables [sequences][max_blocks]; dim a multiple of 16, at most 256.
void starling_paged_attention(const void* q, const void* kv, const int32_t* block_tables, int64_t max_blocks,
                              const int32_t* query_start, const int32_t* context_lens, int64_t sequences,
                              int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, float scale,
                              int64_t window, float soft_cap, void* out, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    attend(Attention<T>{static_cast<const T*>(q), static_cast<const T*>(kv), block_tables, max_blocks, heads, kv_heads,
                        dim, block_size, scale, window, soft_cap, static_cast<T*>(out)},
           query_start, context_lens, sequences, threads);
  };
  if (fp32)
    run(float{});
  else
    run(bf16{});
}

}  // extern "C"
