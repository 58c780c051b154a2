// Division of work among threads, and each thread's memory for intermediate results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "team.h"

namespace starling {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Number of threads worth waking for `pieces` of work that read `bytes` of memory in all. Waking one costs a microsecond or two,
// far more on a busy machine. A thread alone reads a hundred bytes and more in a nanosecond.
inline int threads_for(int64_t pieces, int64_t bytes, int threads) {
  return bytes < 256 * 1024 ? 1 : static_cast<int>(pieces < threads ? pieces : threads);
}

// A growing 64-byte aligned buffer, given out in pieces that live until the next reset. Each thread that runs a kernel
// has one, so that calls do not allocate.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  static Scratch& mine() {
    static thread_local Scratch scratch;
    return scratch;
  }

  void reset(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    std::free(data_);
    size_ = (bytes + 4095) / 4096 * 4096;
    data_ = static_cast<char*>(std::aligned_alloc(4096, size_));
    if (data_ == nullptr) throw std::bad_alloc();
  }

  template <typename T>
  T* take(size_t count) {
    T* piece = reinterpret_cast<T*>(data_ + used_);
    used_ += padded<T>(count);
    return piece;
  }

  template <typename T>
  static size_t padded(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

}  // namespace starling
