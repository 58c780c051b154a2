// Copies one chunk of the paged cache between its pages and a slot of host memory.
#include <cstdint>
#include <cstring>

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
        std::memcpy(page, run, run_bytes);
      else
        std::memcpy(run, page, run_bytes);
    }
  }
}
