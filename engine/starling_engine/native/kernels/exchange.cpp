// Ranks of one machine exchange tensors through memory that they share. Nothing is sent: each leaves its part in a slot of its own,
// says so, waits for the others to have done the same, and reads theirs.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "parallel.h"
#include "simd.h"

namespace starling {
namespace {

struct alignas(64) Counter {
  std::atomic<uint64_t> rounds;
};

// A counter and two slots for each rank. A slot is written again two rounds later: by then all others have arrived at the round
// between, and so are done with it.
struct Area {
  char* base;
  int64_t rank, count, slot_bytes;

  Counter& counter(int64_t r) const { return reinterpret_cast<Counter*>(base)[r]; }
  char* slot(int64_t r, uint64_t round) const {
    return base + count * sizeof(Counter) + (r * 2 + static_cast<int64_t>(round % 2)) * slot_bytes;
  }
};

// Until `r` has arrived at the round. Spins for as long as a rank with a core of its own may be late, then lets others run.
bool wait_for(const Area& area, int64_t r, uint64_t round, std::chrono::steady_clock::time_point end) {
  constexpr int kSpins = 4000, kYields = 256;
  const std::atomic<uint64_t>& rounds = area.counter(r).rounds;
  for (int i = 0; i < kSpins; ++i) {
    if (rounds.load(std::memory_order_acquire) >= round) return true;
    _mm_pause();
  }
  while (true) {
    for (int i = 0; i < kYields; ++i) {
      if (rounds.load(std::memory_order_acquire) >= round) return true;
      sched_yield();
    }
    if (std::chrono::steady_clock::now() > end) return false;
  }
}

// This rank's `bytes` into its slot; true once all ranks have theirs there.
bool meet(const Area& area, const void* mine, int64_t bytes, uint64_t round, std::chrono::steady_clock::time_point end) {
  std::memcpy(area.slot(area.rank, round), mine, bytes);
  area.counter(area.rank).rounds.store(round, std::memory_order_release);
  for (int64_t r = 0; r < area.count; ++r)
    if (r != area.rank && !wait_for(area, r, round, end)) return false;
  return true;
}

// In the order of the ranks on every one of them, so that all have the same sum to the bit.
void add_up(const Area& area, uint64_t round, float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t r = 0; r < area.count; ++r)
      sum = _mm512_add_ps(sum, load16(reinterpret_cast<const float*>(area.slot(r, round)) + i, lanes));
    store16(x + i, sum, lanes);
  }
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// Bytes that the ranks must share, zeroed before the first of them begins.
int64_t starling_exchange_bytes(int64_t count, int64_t slot_bytes) {
  return count * static_cast<int64_t>(sizeof(Counter)) + 2 * count * slot_bytes;
}

// x [bytes] of each rank -> out [count][bytes], or, without `out`, the sum of x as floats in place. slot_bytes is a multiple of 64.
// Returns 1, or 0 when another rank did not come within `seconds`.
int starling_exchange(void* area_base, int64_t rank, int64_t count, int64_t slot_bytes, void* x, int64_t bytes, void* out,
                      double seconds) {
  const Area area{static_cast<char*>(area_base), rank, count, slot_bytes};
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                          std::chrono::duration<double>(seconds));
  uint64_t round = area.counter(rank).rounds.load(std::memory_order_relaxed);
  for (int64_t at = 0; at < bytes; at += slot_bytes) {
    const int64_t here = std::min(slot_bytes, bytes - at);
    char* mine = static_cast<char*>(x) + at;
    if (!meet(area, mine, here, ++round, end)) return 0;
    if (out == nullptr)
      add_up(area, round, reinterpret_cast<float*>(mine), here / static_cast<int64_t>(sizeof(float)));
    else
      for (int64_t r = 0; r < count; ++r)
        std::memcpy(static_cast<char*>(out) + r * bytes + at, area.slot(r, round), here);
  }
  return 1;
}

}  // extern "C"
