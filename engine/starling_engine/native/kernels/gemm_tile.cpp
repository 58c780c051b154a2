#include "gemm_tile.h"

#include <array>

namespace starling {
namespace {

template <int ROWS, int BLOCKS, int AHEAD>
void run_tile(const GemmTile& t) {
  __m512 acc[ROWS][BLOCKS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < BLOCKS; ++j)
      acc[i][j] = t.accumulate ? _mm512_loadu_ps(t.c + i * t.c_stride + j * 16) : _mm512_setzero_ps();

  const bf16* a = t.a;
  const bf16* b = t.b;
  const bf16* ahead = t.prefetch;
  for (int64_t k = 0; k < t.k_pairs; ++k, a += 2, b += 32, ahead += 32) {
#pragma GCC unroll 3
    for (int j = 0; j < AHEAD; ++j) _mm_prefetch(reinterpret_cast<const char*>(ahead + j * t.b_stride), _MM_HINT_T1);
    __m512bh line[BLOCKS];
#pragma GCC unroll 3
    for (int j = 0; j < BLOCKS; ++j) line[j] = (__m512bh)_mm512_loadu_si512(b + j * t.b_stride);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      int32_t pair;
      std::memcpy(&pair, a + i * t.a_stride, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 3
      for (int j = 0; j < BLOCKS; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], both, line[j]);
    }
  }

#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < BLOCKS; ++j) _mm512_storeu_ps(t.c + i * t.c_stride + j * 16, acc[i][j]);
}

using Run = void (*)(const GemmTile&);
using ByAhead = std::array<Run, 3>;
using ByBlocks = std::array<ByAhead, kTileBlocks>;

template <int ROWS>
constexpr ByBlocks with_rows() {
  return {{{run_tile<ROWS, 1, 0>, run_tile<ROWS, 1, 1>, run_tile<ROWS, 1, 1>},
           {run_tile<ROWS, 2, 0>, run_tile<ROWS, 2, 1>, run_tile<ROWS, 2, 2>},
           {run_tile<ROWS, 3, 0>, run_tile<ROWS, 3, 1>, run_tile<ROWS, 3, 3>}}};
}

constexpr std::array<ByBlocks, kTileRows> kRun = {with_rows<1>(), with_rows<2>(), with_rows<3>(), with_rows<4>(),
                                                  with_rows<5>(), with_rows<6>(), with_rows<7>(), with_rows<8>()};

}  // namespace

void gemm_tile(const GemmTile& tile, int rows, int blocks, int blocks_ahead) {
  kRun[rows - 1][blocks - 1][blocks_ahead < 2 ? blocks_ahead : 2](tile);
}

}  // namespace starling
