// Ranks of one machine exchange tensors through memory that they share. Each writes its part to a slot of its own, raises its
// counter, waits for the counters of the others, and reads their slots.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace starling {
namespace {

struct alignas(64) Counter {
  std::atomic<uint64_t> rounds;
};

// A counter and two slots for each rank. A slot is written again two rounds later. By then all others have reached the round
// between, so they have read it.
struct Area {
  char* base;
  int64_t rank, count, slot_bytes;

  Counter& counter(int64_t r) const { return reinterpret_cast<Counter*>(base)[r]; }
  char* slot(int64_t r, uint64_t round) const {
    return base + count * sizeof(Counter) + (r * 2 + static_cast<int64_t>(round % 2)) * slot_bytes;
  }
};

// Waits until `r` has reached the round. Spins as long as a rank with a core of its own may be late, then lets others run.
bool wait_for(const Area& area, int64_t r, uint64_t round, std::chrono::steady_clock::time_point end) {
  constexpr int kSpins = 4000, kYields = 256;
  const std::atomic<uint64_t>& rounds = area.counter(r).rounds;
  for (int i = 0; i < kSpins; ++i) {
    if (rounds.load(std::memory_order_acquire) >= round) return true;
    relax();
  }
  while (true) {
    for (int i = 0; i < kYields; ++i) {
      if (rounds.load(std::memory_order_acquire) >= round) return true;
      sched_yield();
    }
    if (std::chrono::steady_clock::now() > end) return false;
  }
}

constexpr int64_t kAllCame = -1, kDisagree = -2;

// Publishes this rank's slot, and waits for those of the others. Returns kAllCame, or a rank that did not come.
int64_t wait_for_all(const Area& area, uint64_t round, std::chrono::steady_clock::time_point end) {
  area.counter(area.rank).rounds.store(round, std::memory_order_release);
  for (int64_t r = 0; r < area.count; ++r)
    if (r != area.rank && !wait_for(area, r, round, end)) return r;
  return kAllCame;
}

std::chrono::steady_clock::time_point deadline_in(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

// Sums in the order of the ranks, so that all have the same result to the bit.
void add_up(const Area& area, uint64_t round, float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const Lanes lanes = first_lanes(n - i);
    Floats sum = splat16(0.0f);
    for (int64_t r = 0; r < area.count; ++r)
      sum = sum + load16(reinterpret_cast<const float*>(area.slot(r, round)) + i, lanes);
    store16(x + i, sum, lanes);
  }
}

// All-to-all, piece by piece through the slots. No rank knows the number of pieces alone, so each slot of the first piece begins
// with a header: the bytes that its rank sends to each other rank.
struct Parts {
  const Area& area;
  std::vector<int64_t> begins, totals;  // where each rank's bytes for this rank begin, and how many it sends in all
  int64_t header, room, pieces = 1;

  explicit Parts(const Area& a) : area(a), begins(a.count), totals(a.count) {
    header = ceil_div(a.count * static_cast<int64_t>(sizeof(int64_t)), 64) * 64;
    room = a.slot_bytes - header;
  }

  void write(uint64_t round, int64_t piece, const char* x, const int64_t* sent) const {
    char* slot = area.slot(area.rank, round);
    int64_t total = 0;
    for (int64_t r = 0; r < area.count; ++r) total += sent[r];
    if (piece == 0) std::memcpy(slot, sent, area.count * sizeof(int64_t));
    const int64_t here = std::min(room, total - piece * room);
    if (here > 0) std::memcpy(slot + header, x + piece * room, here);
  }

  // Returns false when a rank sends this one another number of bytes than it expects.
  bool read_headers(uint64_t round, const int64_t* received) {
    for (int64_t r = 0; r < area.count; ++r) {
      const int64_t* sizes = reinterpret_cast<const int64_t*>(area.slot(r, round));
      for (int64_t to = 0; to < area.count; ++to) {
        if (to == area.rank) begins[r] = totals[r];
        totals[r] += sizes[to];
      }
      pieces = std::max(pieces, ceil_div(totals[r], room));
      if (sizes[area.rank] != received[r]) return false;
    }
    return true;
  }

  void read(uint64_t round, int64_t piece, char* out, const int64_t* received) const {
    for (int64_t r = 0; r < area.count; out += received[r++]) {
      const int64_t first = std::max(begins[r], piece * room);
      const int64_t last = std::min(begins[r] + received[r], (piece + 1) * room);
      if (first < last) std::memcpy(out + first - begins[r], area.slot(r, round) + header + first - piece * room, last - first);
    }
  }
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// Bytes that the ranks must share, zeroed before the first of them begins.
int64_t starling_exchange_bytes(int64_t count, int64_t slot_bytes) {
  return count * static_cast<int64_t>(sizeof(Counter)) + 2 * count * slot_bytes;
}

// x [bytes] of each rank -> out [count][bytes], or, without `out`, the sum of x as floats in place. slot_bytes is a multiple of 64.
// Returns kAllCame, or a rank that did not come within `seconds`.
int64_t starling_exchange(void* area_base, int64_t rank, int64_t count, int64_t slot_bytes, void* x, int64_t bytes, void* out,
                          double seconds) {
  const Area area{static_cast<char*>(area_base), rank, count, slot_bytes};
  const auto end = deadline_in(seconds);
  uint64_t round = area.counter(rank).rounds.load(std::memory_order_relaxed);
  for (int64_t at = 0; at < bytes; at += slot_bytes) {
    const int64_t here = std::min(slot_bytes, bytes - at);
    char* mine = static_cast<char*>(x) + at;
    std::memcpy(area.slot(rank, ++round), mine, here);
    if (const int64_t lost = wait_for_all(area, round, end); lost != kAllCame) return lost;
    if (out == nullptr)
      add_up(area, round, reinterpret_cast<float*>(mine), here / static_cast<int64_t>(sizeof(float)));
    else
      for (int64_t r = 0; r < count; ++r)
        std::memcpy(static_cast<char*>(out) + r * bytes + at, area.slot(r, round), here);
  }
  return kAllCame;
}

// x has sent[r] bytes for each rank r, one part behind the other; out gets received[r] bytes from each. Returns kDisagree where
// one rank sends another number of bytes than the other expects; else as above.
int64_t starling_exchange_parts(void* area_base, int64_t rank, int64_t count, int64_t slot_bytes, const void* x,
                                const int64_t* sent, void* out, const int64_t* received, double seconds) {
  const Area area{static_cast<char*>(area_base), rank, count, slot_bytes};
  const auto end = deadline_in(seconds);
  uint64_t round = area.counter(rank).rounds.load(std::memory_order_relaxed);
  Parts parts(area);
  for (int64_t piece = 0; piece < parts.pieces; ++piece) {
    parts.write(++round, piece, static_cast<const char*>(x), sent);
    if (const int64_t lost = wait_for_all(area, round, end); lost != kAllCame) return lost;
    if (piece == 0 && !parts.read_headers(round, received)) return kDisagree;
    parts.read(round, piece, static_cast<char*>(out), received);
  }
  return kAllCame;
}

}  // extern "C"
