// y = x W^T + b with W in float8_e4m3fn.
#include "fp8_linear.h"
#include "replay.h"

using namespace starling;

extern "C" {

// Codes [n, k] and scales [n, groups] -> the packed form. A group has a multiple of 16 columns; n is a multiple of 16 where gated.
void starling_pack_fp8(const uint8_t* codes, const float* scales, int64_t n, int64_t k, int64_t groups, int gated, uint8_t* out,
                       float* out_scales, int threads) {
  parallel_for(ceil_div(n, kBlockCols), threads, [&](int64_t block) {
    for (int64_t i = 0; i < kBlockCols; ++i) {
      const int64_t row = packed_row(block, i, n, gated != 0);
      uint8_t* to = out + block * kBlockCols * k + i * 2;
      for (int64_t pair = 0; pair < k / 2; ++pair) {
        if (row < n)
          std::memcpy(to + pair * 32, codes + row * k + pair * 2, 2);
        else
          std::memset(to + pair * 32, 0, 2);
      }
      for (int64_t g = 0; g < groups; ++g)
        out_scales[(block * groups + g) * kBlockCols + i] = row < n ? scales[row * groups + g] : 0;
    }
  });
}

// x [m, k] bf16 (rows x_stride elements apart) -> out [m, n], or gated [m, n / 2], bf16 or fp32 (rows out_stride apart). `bias`
// may be null.
void starling_fp8_linear(const bf16* x, int64_t x_stride, int64_t m, const uint8_t* packed, const float* scales, int64_t n,
                         int64_t k, int64_t groups, const bf16* bias, int gated, void* out, int64_t out_stride, int out_fp32,
                         int threads) {
  Scratch& scratch = Scratch::mine();
  scratch.reset(Scratch::padded<Bf16Operand>(OperandRows::room(m, k)));
  const OperandRows operand = OperandRows::of(x, x_stride, m, k, scratch.take<Bf16Operand>(OperandRows::room(m, k)), threads);
  const Fp8Product product{operand.rows, operand.stride, reinterpret_cast<const fp8_weight*>(packed), scales, n, k, groups};
  const auto to = [&](auto type) {
    const StoreSums<decltype(type)> store{bias, n, gated != 0, static_cast<decltype(type)*>(out), out_stride};
#ifdef STARLING_TILES
    if (by_tiles(m, k)) return multiply_all_by_tiles<kMaxRows>(x, x_stride, m, n, k, product.tiles(), store, threads);
#endif
    in_parallel(threads_for(ceil_div(n, kBlockCols), n * k * ceil_div(m, 8), threads), [&](Part part) {
      const Span mine = part.of(ceil_div(n, kBlockCols));
      for (int64_t row = 0; row < m; row += kMaxRows) product.run_span(mine, row, std::min(kMaxRows, m - row), store);
    });
  };
  out_fp32 ? to(float{}) : to(bf16{});
}

// Rows `ids` of the packed weight -> out [tokens, k].
void starling_embedding_fp8(const int64_t* ids, int64_t tokens, const uint8_t* packed, const float* scales, int64_t /* n */,
                            int64_t k, int64_t groups, bf16* out, int threads) {
  parallel_for(tokens, threads_for(tokens, tokens * k * 32, threads), [&](int64_t t) {
    const int64_t block = ids[t] / kBlockCols, lane = ids[t] % kBlockCols, size = k / groups;
    alignas(64) uint8_t codes[16];
    alignas(64) float values[16];
    for (int64_t at = 0; at < k; at += 16) {
      for (int64_t j = 0; j < 16; j += 2)
        std::memcpy(codes + j, packed + (block * k + at + j) * kBlockCols + lane * 2, 2);
      unpack(reinterpret_cast<const fp8*>(codes), 16, values);
      store16(out + t * k + at, load16(values) * splat16(scales[(block * groups + at / size) * kBlockCols + lane]));
    }
  });
}

}  // extern "C"

STARLING_RECORDABLE(starling_fp8_linear)
STARLING_RECORDABLE(starling_embedding_fp8)
