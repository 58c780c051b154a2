// y = x W^T + b with bf16 x and W. W is packed once (see gemm_tile.h), so that every batch size reads it in order.
#include "linear.h"
#include "replay.h"

namespace starling {
namespace {

template <typename Out>
void run_linear(const PackedProduct& product, int64_t m, const StoreSums<Out>& store, int threads) {
#ifdef STARLING_TILES
  if (by_tiles(m, product.k)) {
    const TilesOf tiles_of{product.packed, product.k};
    return multiply_all_by_tiles<kMaxRows>(product.x, product.x_stride, m, product.n, product.k, tiles_of, store, threads);
  }
#endif
  in_parallel(threads, [&](Part part) {
    const Span mine = part.of(ceil_div(product.n, kBlockCols));
    for (int64_t row = 0; row < m; row += kMaxRows) product.run_span(mine, row, std::min(kMaxRows, m - row), store);
  });
}

// Packs one block of 16 rows of W to [K/2][16][2]: `rows` rows from `w` on and zeros after them, or, with `up`, 8 from each.
void pack_block(const bf16* w, const bf16* up, int64_t rows, int64_t k, bf16* out) {
  for (int64_t k0 = 0; k0 < k; k0 += 32) {
    const bf16* row[16];
    for (int i = 0; i < 16; ++i)
      row[i] = i >= rows ? nullptr : (up && i >= 8 ? up + (i - 8) * k : w + i * k) + k0;
    transpose16(row, std::min<int64_t>(32, k - k0) / 2, reinterpret_cast<int32_t*>(out + k0 * 16), stream);
  }
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// w [n, k] -> out [ceil(n / 16), k / 2, 16, 2], 64-byte aligned; k even, and n a multiple of 16 where it is gated.
void starling_pack_linear(const bf16* w, int64_t n, int64_t k, bf16* out, int gated, int threads) {
  const int64_t blocks = ceil_div(n, kBlockCols);
  in_parallel(threads, [&](Part part) {
    const Span mine = part.of(blocks);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const bf16* rows = w + i * (gated ? 8 : 16) * k;
      pack_block(rows, gated ? rows + n / 2 * k : nullptr, std::min<int64_t>(16, n - i * 16), k, out + i * 16 * k);
    }
    end_of_stream();
  });
}

// x [m, k] (rows x_stride elements apart) -> out [m, n], or gated [m, n / 2], bf16 or fp32. `bias` may be null.
void starling_linear(const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k,
                     const bf16* bias, int gated, void* out, int out_fp32, int threads) {
  Scratch& scratch = Scratch::mine();
  scratch.reset(Scratch::padded<Bf16Operand>(OperandRows::room(m, k)));
  const OperandRows operand = OperandRows::of(x, x_stride, m, k, scratch.take<Bf16Operand>(OperandRows::room(m, k)), threads);
  const PackedProduct product{operand.rows, operand.stride, packed, n, k};
  const int64_t width = gated ? n / 2 : n;
  if (out_fp32)
    run_linear(product, m, StoreSums<float>{bias, n, gated != 0, static_cast<float*>(out), width}, threads);
  else
    run_linear(product, m, StoreSums<bf16>{bias, n, gated != 0, static_cast<bf16*>(out), width}, threads);
}

// Rows `ids` of the packed weight -> out [tokens, k].
void starling_embedding_packed(const int64_t* ids, int64_t tokens, const bf16* packed, int64_t k, bf16* out,
                               int threads) {
  parallel_for(tokens, threads_for(tokens, tokens * k * 32, threads), [&](int64_t t) {
    const bf16* row = packed + ids[t] / 16 * 16 * k + ids[t] % 16 * 2;
    for (int64_t pair = 0; pair < k / 2; ++pair) std::memcpy(out + t * k + pair * 2, row + pair * 32, 4);
  });
}

// Rows `ids` of a table, each of `row_bytes` -> out [tokens][row_bytes].
void starling_embedding(const int64_t* ids, int64_t tokens, const char* table, int64_t row_bytes, char* out, int threads) {
  parallel_for(tokens, threads_for(tokens, tokens * row_bytes * 2, threads), [&](int64_t t) {
    std::memcpy(out + t * row_bytes, table + ids[t] * row_bytes, row_bytes);
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_embedding)
STARLING_RECORDABLE(starling_linear)
STARLING_RECORDABLE(starling_embedding_packed)
