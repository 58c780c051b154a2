// The recurrent state of a layer in the blocks of the pool, and a step's sequences that have one.
#pragma once

#include <cstdint>

namespace starling {

struct StateRows {
  float* storage;        // [blocks][block_stride]
  int64_t block_stride;  // in elements
  const int32_t* tables;  // [sequences][width]: blocks of each sequence
  int64_t width, column, per_block, first;  // row r is number first + r, in the block of `column` + number / per_block
  int64_t elements;                         // of a row

  float* row(int64_t sequence, int64_t r) const {
    const int64_t number = first + r;
    const int64_t block = tables[sequence * width + column + number / per_block];
    return storage + block * block_stride + number % per_block * elements;
  }
};

struct StepSequences {
  const int64_t* slots;         // [tokens]
  const int32_t* query_start;   // [count + 1]
  const int32_t* context_lens;  // [count]: tokens after the step
  const int32_t* taken;         // [count]: the first tokens, which the state takes in, or 0; null: all
  int64_t count;

  int64_t begin(int64_t s) const { return query_start[s]; }
  int64_t size(int64_t s) const { return query_start[s + 1] - query_start[s]; }
  // Whether the state takes tokens in. Of a row with drafts it stays as it was.
  bool takes(int64_t s) const { return !taken || taken[s] > 0; }
  // Tokens that are computed.
  int64_t run(int64_t s) const { return taken && taken[s] > 0 ? taken[s] : size(s); }
  // Whether it begins in this step, so that its state is zeros, whatever its blocks hold.
  bool is_first(int64_t s) const { return context_lens[s] == size(s); }
  // What only fills the step up has no slots, and no state.
  bool is_real(int64_t s) const { return size(s) > 0 && slots[begin(s)] >= 0; }
  int64_t tokens() const { return query_start[count]; }
};

}  // namespace starling
