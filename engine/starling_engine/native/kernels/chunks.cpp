// Copies one chunk of the paged cache between its pages and a slot of host memory.
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace starling {
namespace {

constexpr int64_t kLineBytes = 64;

// Writes whole lines past the caches, for a prefix is larger than these: else each line would be read before it is written. The
// system's own copy does the same with large memory, but sees one run at a time.
void copy_run(char* to, const char* from, int64_t bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % kLineBytes) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t at = 0; at < bytes; at += kLineBytes)
    for (int64_t part = at; part < at + kLineBytes; part += sizeof(IReg))
      stream(to + part, *reinterpret_cast<const IReg*>(from + part));
}

}  // namespace
}  // namespace starling

using namespace starling;

// A block is [runs][run_bytes], `stride` behind the one before; a slot is [runs][blocks_per_chunk][run_bytes]. `blocks` are those of
// the chunk from number `first` on.
extern "C" void starling_copy_chunk(char* pages, int64_t stride, int64_t runs, int64_t run_bytes,
                                    const int64_t* blocks, int64_t num_blocks, int64_t first, int64_t blocks_per_chunk,
                                    char* slot, int to_pages) {
  for (int64_t at = 0; at < runs; ++at) {
    char* run = slot + (at * blocks_per_chunk + first) * run_bytes;
    for (int64_t b = 0; b < num_blocks; ++b, run += run_bytes) {
      char* page = pages + blocks[b] * stride + at * run_bytes;
      if (to_pages)
        copy_run(page, run, run_bytes);
      else
        copy_run(run, page, run_bytes);
    }
  }
  end_of_stream();
}
