// The inputs of a step of decodes, out of the batch's arrays, and its tokens in them.
#include <algorithm>
#include <cstdint>

#include "replay.h"

namespace {

// A KV group's block tables, and what becomes of the step's.
struct Group {
  int64_t table, stride;  // of the batch: int32 [slots, stride]
  int64_t fixed;          // blocks of each row; 0: as many as its context takes
  int64_t slot_mapping;   // int64 [rows]
  int64_t block_tables, block_tables_stride;  // int32 [rows, stride]
};

}  // namespace

extern "C" {

// Row i is one token of the sequence in `slots[i]`, at `starts[i]`; below 0: its last one. `tokens` [slots, tokens_stride] and
// `lengths` [slots] are the batch's. Writes ids, positions, those behind them and context lengths [rows], and query_start [rows + 1].
void starling_decode_inputs(const int64_t* slots, const int64_t* starts, int64_t rows, const int32_t* tokens, int64_t tokens_stride,
                            const int64_t* lengths, int64_t block_size, const void* groups, int64_t num_groups, int64_t* ids,
                            int64_t* positions, int64_t* behind, int32_t* query_start, int32_t* context_lens) {
  const Group* first = static_cast<const Group*>(groups);
  query_start[0] = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t slot = slots[i], at = starts[i] < 0 ? lengths[slot] - 1 : starts[i];
    ids[i] = tokens[slot * tokens_stride + at];
    positions[i] = at;
    behind[i] = at + 1;
    context_lens[i] = static_cast<int32_t>(at + 1);
    query_start[i + 1] = static_cast<int32_t>(i + 1);
    for (const Group* group = first; group < first + num_groups; ++group) {
      const int32_t* table = reinterpret_cast<const int32_t*>(group->table) + slot * group->stride;
      const int64_t blocks = group->fixed > 0 ? group->fixed : at / block_size + 1;
      std::copy(table, table + blocks, reinterpret_cast<int32_t*>(group->block_tables) + i * group->block_tables_stride);
      reinterpret_cast<int64_t*>(group->slot_mapping)[i] = table[at / block_size] * block_size + at % block_size;
    }
  }
}

// Takes the token of each row at its position `behind` in the sequence in `slots[i]`, which ends there.
void starling_take_tokens(const int64_t* slots, const int64_t* behind, int64_t rows, const int64_t* sampled, int32_t* tokens,
                          int64_t tokens_stride, int64_t* lengths) {
  for (int64_t i = 0; i < rows; ++i) {
    tokens[slots[i] * tokens_stride + behind[i]] = static_cast<int32_t>(sampled[i]);
    lengths[slots[i]] = behind[i] + 1;
  }
}

}  // extern "C"

STARLING_RECORDABLE(starling_decode_inputs)
STARLING_RECORDABLE(starling_take_tokens)
