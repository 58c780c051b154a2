// Attention in both directions, of encoders: whole sequences, of which nothing is cached. Sums and weights of keys are fp32.
#include <limits>

#include "gemm_tile.h"
#include "parallel.h"

namespace starling {
namespace {

template <typename T>
struct Heads {
  const T* data;  // [tokens][heads][dim], tokens `stride` elements apart
  int64_t stride;

  const T* row(int64_t token, int64_t head, int64_t dim) const { return data + token * stride + head * dim; }
};

// One head of one sequence.
template <typename T>
class Head {
 public:
  // `keys` are seen of `length` tokens; of these, fewer than `window` away (0: all).
  Head(int64_t length, int64_t keys, int64_t dim, int64_t window)
      : length_(length), keys_(keys), dim_(dim), window_(window), blocks_(ceil_div(keys, 16)) {
    Scratch& scratch = Scratch::mine();
    const int64_t width = blocks_ * 16;
    scratch.reset(2 * Scratch::padded<float>(width * dim) + Scratch::padded<float>(kRows * width) + 2 * Scratch::padded<float>(16 * dim));
    k_ = scratch.take<float>(width * dim);
    v_ = scratch.take<float>(width * dim);
    weights_ = scratch.take<float>(kRows * width);
    rows_ = scratch.take<float>(16 * dim);
    sums_ = scratch.take<float>(16 * dim);
  }

  // Copies keys to [blocks][dim][16], and values to [dim / 16][keys][16].
  void copy(const Heads<T>& k, const Heads<T>& v, int64_t first, int64_t head) {
    for (int64_t block = 0; block < blocks_; ++block) {
      const float* row[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t at = block * 16 + i;
        row[i] = at < keys_ ? rows_ + i * dim_ : nullptr;
        if (at < keys_) unpack(k.row(first + at, head, dim_), dim_, rows_ + i * dim_);
      }
      for (int64_t d = 0; d < dim_; d += 16) {
        const float* part[16];
        for (int i = 0; i < 16; ++i) part[i] = row[i] ? row[i] + d : nullptr;
        transpose16(part, 16, reinterpret_cast<int32_t*>(k_ + (block * dim_ + d) * 16), [](int32_t* p, IReg r) { store_words(p, r); });
      }
    }
    for (int64_t at = 0; at < keys_; ++at) {
      const T* row = v.row(first + at, head, dim_);
      for (int64_t d = 0; d < dim_; d += 16) store16(v_ + d * keys_ + at * 16, load16(row + d));
    }
  }

  void attend(const Heads<T>& q, int64_t first, int64_t head, float scale, T* out, int64_t out_stride) {
    for (int64_t row = 0; row < length_; row += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, length_ - row);
      // The blocks that one of these rows sees.
      const int64_t low = window_ ? std::max<int64_t>(0, row - window_ + 1) / 16 : 0;
      const int64_t high = window_ ? std::min(blocks_, ceil_div(row + rows - 1 + window_, 16)) : blocks_;
      const Floats scales = splat16(scale * kLog2E);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < dim_; d += 16)
          store16(rows_ + i * dim_ + d, load16(q.row(first + row + i, head, dim_) + d) * scales);
      multiply(rows_, dim_, k_ + low * dim_ * 16, dim_, high - low, weights_, rows);
      float inverse[kRows];
      for (int64_t i = 0; i < rows; ++i) {
        const float sum = weigh(weights_ + i * blocks_ * 16, row + i, low, high);
        inverse[i] = sum == 0 ? 0 : 1 / sum;  // a row that sees nothing is zeros
      }
      const int64_t from = low * 16, to = std::max(from, std::min(high * 16, keys_));  // none may be seen
      multiply(weights_, blocks_ * 16, v_ + from * 16, to - from, dim_ / 16, sums_, rows, keys_, dim_);
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < dim_; d += 16)
          store16(out + (row + i) * out_stride + d, load16(sums_ + i * dim_ + d) * splat16(inverse[i]));
    }
  }

 private:
  static constexpr int64_t kRows = kTileRowsOf<float>;

  // a [rows][lines] times `blocks` of columns -> c, whose rows are as wide as those of weights unless `c_stride` says.
  void multiply(const float* a, ptrdiff_t a_stride, const float* b, int64_t lines, int64_t blocks, float* c, int64_t rows,
                int64_t block_lines = 0, ptrdiff_t c_stride = 0) const {
    const ptrdiff_t b_stride = (block_lines ? block_lines : lines) * 16, stride = c_stride ? c_stride : blocks_ * 16;
    for (int64_t at = 0, step = tile_blocks(rows); at < blocks; at += step) {
      const float* block = b + at * b_stride;
      gemm_tile<float>({a, a_stride, block, b_stride, lines, c + at * 16, stride, false, block}, static_cast<int>(rows),
                       static_cast<int>(std::min(step, blocks - at)), 0);
    }
  }

  // The sums of a row by blocks [low, high) of keys become 2^(sum - the highest), or 0 where a key is not seen. Returns their sum.
  float weigh(float* row, int64_t query, int64_t low, int64_t high) const {
    const auto seen = [&](int64_t block) {
      const int64_t from = block * 16;
      const Lanes all = first_lanes(keys_ - from);
      if (!window_) return all;
      const int64_t begin = std::clamp<int64_t>(query - window_ + 1 - from, 0, 16), end = std::clamp<int64_t>(query + window_ - from, 0, 16);
      return static_cast<Lanes>(all & first_lanes(end) & ~(begin == 16 ? kAllLanes : first_lanes(begin)));
    };
    const Floats lowest_float = splat16(-std::numeric_limits<float>::infinity());
    Floats top = lowest_float, sum = splat16(0.0f);
    for (int64_t block = low; block < high; ++block)
      top = highest(choose(seen(block), load16(row + (block - low) * 16), lowest_float), top);
    const Floats highest_sum = splat16(highest_of(top));
    for (int64_t block = low; block < high; ++block) {
      float* at = row + (block - low) * 16;
      const Floats weight = choose(seen(block), exp2(load16(at) - highest_sum), splat16(0.0f));
      store16(at, weight);
      sum = sum + weight;
    }
    return sum_of(sum);
  }

  int64_t length_, keys_, dim_, window_, blocks_;
  float *k_, *v_, *weights_, *rows_, *sums_;
};

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// q [tokens, heads, dim], k and v [tokens, kv_heads, dim], tokens strides apart -> out [tokens, heads, dim]; dim a multiple of 16.
// Sequence s is tokens [starts[s], starts[s + 1]), of which the first seen[s] are seen, and fewer than `window` away (0: all).
void starling_bidirectional_attention(const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                                      int64_t heads, int64_t kv_heads, int64_t dim, const int64_t* starts, const int64_t* seen,
                                      int64_t sequences, int64_t window, float scale, void* out, int fp32, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    const Heads<T> queries{static_cast<const T*>(q), q_stride}, keys{static_cast<const T*>(k), k_stride},
        values{static_cast<const T*>(v), v_stride};
    // Heads of the same keys share their copy, unless there are too few keys for the threads.
    const int64_t group = heads / kv_heads, sharing = sequences * kv_heads < threads ? 1 : group, parts = heads / sharing;
    each_in_turn(sequences * parts, threads, [&](int64_t task) {
      const int64_t s = task / parts, begin = task % parts * sharing, first = starts[s];
      Head<T> one(starts[s + 1] - first, seen[s], dim, window);
      one.copy(keys, values, first, begin / group);
      for (int64_t head = begin; head < begin + sharing; ++head)
        one.attend(queries, first, head, scale, static_cast<T*>(out) + (first * heads + head) * dim, heads * dim);
    });
  };
  fp32 ? run(float{}) : run(bf16{});
}

}  // extern "C"
