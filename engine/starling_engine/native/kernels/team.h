// The threads that share a kernel's work: one team for each thread that calls kernels.
#pragma once

#include <atomic>
#include <cstdint>

namespace starling {

struct Span {
  int64_t begin, end;
};

// One thread's part of a kernel's work.
struct Part {
  int index, count;

  // Returns its contiguous part of [0, total).
  Span of(int64_t total) const { return {total * index / count, total * (index + 1) / count}; }
};

// Calls `work` for each of `threads` parts at once, the first one in the calling thread. Returns when all are done.
void run_on_team(int threads, void (*call)(const void* work, Part part), const void* work);

// The same for a function object, called with its Part.
template <typename Work>
void in_parallel(int threads, const Work& work) {
  if (threads <= 1) return work(Part{0, 1});
  run_on_team(threads, [](const void* it, Part part) { (*static_cast<const Work*>(it))(part); }, &work);
}

// Calls `each` with every i of [0, total), contiguous parts to each thread.
template <typename Each>
void parallel_for(int64_t total, int threads, const Each& each) {
  in_parallel(threads, [&](Part part) {
    const Span mine = part.of(total);
    for (int64_t i = mine.begin; i < mine.end; ++i) each(i);
  });
}

// The same for pieces of unlike size: each thread takes the next i when it is done with one.
template <typename Each>
void each_in_turn(int64_t total, int threads, const Each& each) {
  std::atomic<int64_t> next{0};
  in_parallel(threads, [&](Part) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;) each(i);
  });
}

}  // namespace starling
