// Copies one chunk of the paged cache between its pages and a slot of host memory.
#include <cstdint>
#include <cstring>

// A page of a layer is [runs][run_bytes], a slot [layers][runs][blocks_per_chunk][run_bytes]. `blocks` are those of the chunk from
// number `first` on.
extern "C" void starling_copy_chunk(char* const* layers, int64_t num_layers, int64_t runs, int64_t run_bytes,
                                    const int64_t* blocks, int64_t num_blocks, int64_t first, int64_t blocks_per_chunk,
                                    char* slot, int to_pages) {
  for (int64_t at = 0; at < num_layers * runs; ++at) {
    char* pages = layers[at / runs] + at % runs * run_bytes;
    char* run = slot + (at * blocks_per_chunk + first) * run_bytes;
    for (int64_t b = 0; b < num_blocks; ++b, run += run_bytes) {
      char* page = pages + blocks[b] * runs * run_bytes;
      if (to_pages)
        std::memcpy(page, run, run_bytes);
      else
        std::memcpy(run, page, run_bytes);
    }
  }
}
