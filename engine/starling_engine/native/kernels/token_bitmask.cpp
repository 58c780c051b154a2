// Sets the logits of tokens that a mask forbids to -inf. A mask has a bit for each token; most of its words of 32 bits allow all
// or none, so a word that allows all is passed over, and the others are written without reading the logits.
#include <algorithm>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace starling {
namespace {

constexpr int64_t kBits = 32;
constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// x are the first 32 logits that a word is about.
inline void forbid(float* x, uint32_t forbidden) {
  store16(x, splat16(kNever), static_cast<Lanes>(forbidden));
  store16(x + 16, splat16(kNever), static_cast<Lanes>(forbidden >> 16));
}

// The words [begin, end) of a row of `vocab` logits.
void apply_words(float* row, int64_t vocab, const uint32_t* words, int64_t begin, int64_t end) {
  const Floats never = splat16(kNever);
  const int64_t whole = std::min(end, vocab / kBits);
  for (int64_t w = begin; w < whole; ++w) {
    float* x = row + w * kBits;
    if (words[w] == 0) {
      store16(x, never);
      store16(x + 16, never);
    } else if (words[w] != kAll) {
      forbid(x, ~words[w]);
    }
  }
  // The row ends within the last word.
  if (whole < end) forbid(row + whole * kBits, ~words[whole] & ((1u << vocab % kBits) - 1));
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// Row rows[m] of the logits, which are `stride` apart, gets the m-th mask; masks are `mask_words` words apart. Rows are distinct.
void starling_apply_token_bitmask(float* logits, int64_t stride, int64_t vocab, const int64_t* rows, int64_t count,
                                  const uint32_t* words, int64_t mask_words, int threads) {
  const int64_t used = ceil_div(vocab, kBits), total = count * used;
  // Threads share a row where there are few.
  in_parallel(threads_for(total, count * vocab * 4, threads), [&](Part part) {
    const Span mine = part.of(total);
    for (int64_t at = mine.begin; at < mine.end;) {
      const int64_t m = at / used, begin = at % used, end = std::min(used, begin + mine.end - at);
      apply_words(logits + rows[m] * stride, vocab, words + m * mask_words, begin, end);
      at += end - begin;
    }
  });
}

}  // extern "C"
