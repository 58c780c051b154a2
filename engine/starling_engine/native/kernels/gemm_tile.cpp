#include "gemm_tile.h"

#include <array>

namespace starling {
namespace {

inline __m512 multiply_add(__m512 sum, __m512i word, __m512i line, bf16) {
  return _mm512_dpbf16_ps(sum, (__m512bh)word, (__m512bh)line);
}
inline __m512 multiply_add(__m512 sum, __m512i word, __m512i line, float) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(word), _mm512_castsi512_ps(line), sum);
}

template <typename T, int ROWS, int BLOCKS, int AHEAD>
void run_tile(const GemmTile<T>& t) {
  __m512 acc[ROWS][BLOCKS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < BLOCKS; ++j)
      acc[i][j] = t.accumulate ? _mm512_loadu_ps(t.c + i * t.c_stride + j * 16) : _mm512_setzero_ps();

  const T* a = t.a;
  const T* b = t.b;
  const T* ahead = t.prefetch;
  for (int64_t n = 0; n < t.lines; ++n, a += kDepth<T>, b += kLine<T>, ahead += kLine<T>) {
#pragma GCC unroll 3
    for (int j = 0; j < AHEAD; ++j)
      _mm_prefetch(reinterpret_cast<const char*>(ahead + j * t.b_stride), _MM_HINT_T0);
    __m512i line[BLOCKS];
#pragma GCC unroll 3
    for (int j = 0; j < BLOCKS; ++j) line[j] = _mm512_loadu_si512(b + j * t.b_stride);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      int32_t word;
      std::memcpy(&word, a + i * t.a_stride, sizeof word);
      const __m512i words = _mm512_set1_epi32(word);
#pragma GCC unroll 3
      for (int j = 0; j < BLOCKS; ++j) acc[i][j] = multiply_add(acc[i][j], words, line[j], T{});
    }
  }

#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 3
    for (int j = 0; j < BLOCKS; ++j) _mm512_storeu_ps(t.c + i * t.c_stride + j * 16, acc[i][j]);
}

template <typename T>
using Run = void (*)(const GemmTile<T>&);
template <typename T>
using ByBlocksAndAhead = std::array<std::array<Run<T>, kTileBlocks + 1>, kTileBlocks>;

template <typename T, int ROWS>
constexpr ByBlocksAndAhead<T> with_rows() {
  return {{{run_tile<T, ROWS, 1, 0>, run_tile<T, ROWS, 1, 1>},
           {run_tile<T, ROWS, 2, 0>, run_tile<T, ROWS, 2, 1>, run_tile<T, ROWS, 2, 2>},
           {run_tile<T, ROWS, 3, 0>, run_tile<T, ROWS, 3, 1>, run_tile<T, ROWS, 3, 2>, run_tile<T, ROWS, 3, 3>}}};
}

template <typename T>
constexpr std::array<ByBlocksAndAhead<T>, kTileRows> kRun = {
    with_rows<T, 1>(), with_rows<T, 2>(), with_rows<T, 3>(), with_rows<T, 4>(),
    with_rows<T, 5>(), with_rows<T, 6>(), with_rows<T, 7>(), with_rows<T, 8>()};

}  // namespace

template <typename T>
void gemm_tile(const GemmTile<T>& tile, int rows, int blocks, int blocks_ahead) {
  kRun<T>[rows - 1][blocks - 1][blocks_ahead](tile);
}

template void gemm_tile(const GemmTile<bf16>&, int, int, int);
template void gemm_tile(const GemmTile<float>&, int, int, int);

}  // namespace starling
