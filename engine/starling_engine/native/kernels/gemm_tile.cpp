#include "gemm_tile.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include "fp8.h"

namespace starling {
namespace {

// How a line of T is multiplied: in kSteps steps, each with a number of A and a vector of the line. `whole` is what the steps of a
// line share.
template <typename T>
struct Line {
  static constexpr int kSteps = 1;
  static const float* whole(const float* line) { return line; }
  static Reg part(const float* line, int) { return load(line); }
  static Reg number(const float* a, int) { return splat(*a); }
  static Reg add(Reg sum, Reg number, Reg part) { return multiply_add(number, part, sum); }
};

template <>
struct Line<bf16> : Line<float> {
  static const bf16* whole(const bf16* line) { return line; }
#ifdef STARLING_BF16_PAIRS
  static IReg part(const bf16* line, int) { return (IReg)load(reinterpret_cast<const float*>(line)); }
  static IReg number(const bf16* a, int) {
    int32_t pair;
    std::memcpy(&pair, a, sizeof pair);
    return IReg{} + pair;
  }
  static Reg add(Reg sum, IReg pair, IReg part) { return multiply_pairs(sum, pair, part); }
#else
  static constexpr int kSteps = 2;
  static Reg part(IReg pairs, int step) { return (Reg)(step == 0 ? pairs << 16 : pairs & ~0xFFFF); }
  static Reg part(const bf16* line, int step) { return part((IReg)load(reinterpret_cast<const float*>(line)), step); }
  static Reg number(const float* a, int step) { return splat(a[step]); }
#endif
};

template <>
struct Line<fp8_weight> : Line<bf16> {
  static IReg whole(const fp8_weight* line) { return bf16_pairs(reinterpret_cast<const fp8*>(line)); }
#ifdef STARLING_BF16_PAIRS
  static IReg part(IReg pairs, int) { return pairs; }
#endif
};

// Has a sum in its register before the next product. With AVX2 GCC else moves sums about, and keeps a mask in memory. On EPYC 9004 a
// tile out of the second-level cache reaches 0.94 of the peak so, and 0.92 without.
inline void settle(Reg& sum) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("" : "+x"(sum));
#endif
}

// KEEPS: lines of fp8 are also written as bf16.
template <typename T, int ROWS, int BLOCKS, int AHEAD, bool KEEPS>
void run_lines(const GemmTile<T>& t) {
  typedef Line<T> L;
  Reg acc[ROWS][BLOCKS * kParts];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 12
    for (int j = 0; j < BLOCKS * kParts; ++j)
      acc[i][j] = t.accumulate && t.scales == nullptr ? load(t.c + i * t.c_stride + j * kLanes) : splat(0.0f);

  const Operand<T>* a = t.a;
  const T* b = t.b;
  const T* ahead = t.prefetch;
  bf16* kept = t.unpacked;
  for (int64_t n = 0; n < t.lines; ++n, a += kDepth<T>, b += kLine<T>, ahead += kLine<T>) {
#pragma GCC unroll 3
    for (int j = 0; j < AHEAD; ++j) fetch(ahead + j * t.b_stride);
    decltype(L::whole(b)) whole[BLOCKS * kParts];
#pragma GCC unroll 12
    for (int j = 0; j < BLOCKS * kParts; ++j)
      whole[j] = L::whole(b + j / kParts * t.b_stride + j % kParts * kLanes * kDepth<T>);
    if constexpr (KEEPS) {
#pragma GCC unroll 12
      for (int j = 0; j < BLOCKS * kParts; ++j)
        store_words(kept + j / kParts * t.unpacked_stride + j % kParts * kLanes * kDepth<bf16>, whole[j]);
      kept += kLine<bf16>;
    }
#pragma GCC unroll 2
    for (int step = 0; step < L::kSteps; ++step) {
      decltype(L::part(whole[0], 0)) parts[BLOCKS * kParts];
#pragma GCC unroll 12
      for (int j = 0; j < BLOCKS * kParts; ++j) parts[j] = L::part(whole[j], step);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const auto number = L::number(a + i * t.a_stride, step);
#pragma GCC unroll 12
        for (int j = 0; j < BLOCKS * kParts; ++j) {
          acc[i][j] = L::add(acc[i][j], number, parts[j]);
          settle(acc[i][j]);
        }
      }
    }
  }

#pragma GCC unroll 12
  for (int j = 0; j < BLOCKS * kParts; ++j) {
    float* c = t.c + j * kLanes;
    if (t.scales != nullptr) {
      const Reg scale = load(t.scales + j / kParts * t.scales_stride + j % kParts * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
        acc[i][j] = multiply_add(acc[i][j], scale, t.accumulate ? load(c + i * t.c_stride) : splat(0.0f));
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) store(c + i * t.c_stride, acc[i][j]);
  }
}

template <typename T, int ROWS, int BLOCKS, int AHEAD>
void run_tile(const GemmTile<T>& t) {
  if constexpr (std::is_same_v<T, fp8_weight>)
    if (t.unpacked != nullptr) return run_lines<T, ROWS, BLOCKS, AHEAD, true>(t);
  run_lines<T, ROWS, BLOCKS, AHEAD, false>(t);
}

template <typename T>
using Run = void (*)(const GemmTile<T>&);
template <typename T>
using ByBlocksAndAhead = std::array<std::array<Run<T>, kTileBlocks + 1>, kTileBlocks>;

template <typename T, int ROWS>
constexpr ByBlocksAndAhead<T> with_rows() {
  if constexpr (ROWS > kTileRowsOf<T>)
    return {};
  else if constexpr (tile_blocks(ROWS) == 1)
    return {{{run_tile<T, ROWS, 1, 0>, run_tile<T, ROWS, 1, 1>}}};
  else if constexpr (tile_blocks(ROWS) == 2)
    return {{{run_tile<T, ROWS, 1, 0>, run_tile<T, ROWS, 1, 1>},
             {run_tile<T, ROWS, 2, 0>, run_tile<T, ROWS, 2, 1>, run_tile<T, ROWS, 2, 2>}}};
  else
    return {{{run_tile<T, ROWS, 1, 0>, run_tile<T, ROWS, 1, 1>},
             {run_tile<T, ROWS, 2, 0>, run_tile<T, ROWS, 2, 1>, run_tile<T, ROWS, 2, 2>},
             {run_tile<T, ROWS, 3, 0>, run_tile<T, ROWS, 3, 1>, run_tile<T, ROWS, 3, 2>, run_tile<T, ROWS, 3, 3>}}};
}

template <typename T>
constexpr std::array<ByBlocksAndAhead<T>, 8> kRun = {with_rows<T, 1>(), with_rows<T, 2>(), with_rows<T, 3>(), with_rows<T, 4>(),
                                                     with_rows<T, 5>(), with_rows<T, 6>(), with_rows<T, 7>(), with_rows<T, 8>()};

#ifdef STARLING_MATRICES
// An odd row is its own second one.
template <int ROWS>
void run_matrices(const MatrixTile& t) {
  constexpr int kTwos = (ROWS + 1) / 2;
  const auto second = [](int i) { return std::min(2 * i + 1, ROWS - 1); };
  Reg acc[kTwos][2 * kParts];
#pragma GCC unroll 3
  for (int i = 0; i < kTwos; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const float *top = t.c + 2 * i * t.c_stride + p * kLanes, *below = t.c + second(i) * t.c_stride + p * kLanes;
      const Reg a = t.accumulate ? load(top) : splat(0.0f), b = t.accumulate ? load(below) : splat(0.0f);
      acc[i][2 * p] = sums_of_first(a, b), acc[i][2 * p + 1] = sums_of_second(a, b);
    }
  const bf16 *a = t.a, *b = t.b;
  for (int64_t step = 0; step < t.steps; ++step, a += 4, b += 64) {
    IReg rows[kTwos];
#pragma GCC unroll 3
    for (int i = 0; i < kTwos; ++i) rows[i] = two_rows(a + 2 * i * t.a_stride, a + second(i) * t.a_stride);
#pragma GCC unroll 8
    for (int j = 0; j < 2 * kParts; ++j) {
      const IReg columns = load_words(b + j * 8, kLanes);
#pragma GCC unroll 3
      for (int i = 0; i < kTwos; ++i) acc[i][j] = starling::multiply_matrices(acc[i][j], rows[i], columns);
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < kTwos; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      store(t.c + second(i) * t.c_stride + p * kLanes, sums_of_second(acc[i][2 * p], acc[i][2 * p + 1]));
      store(t.c + 2 * i * t.c_stride + p * kLanes, sums_of_first(acc[i][2 * p], acc[i][2 * p + 1]));
    }
}
#endif

}  // namespace

#ifdef STARLING_MATRICES
void multiply_matrices(const MatrixTile& tile, int rows) {
  constexpr void (*kRunMatrices[kMatrixRows])(const MatrixTile&) = {run_matrices<1>, run_matrices<2>, run_matrices<3>,
                                                                    run_matrices<4>, run_matrices<5>, run_matrices<6>};
  kRunMatrices[rows - 1](tile);
}

void pack_matrices(const bf16* lines, int64_t steps, bf16* out) {
  for (int64_t step = 0; step < steps; ++step, lines += 2 * kLine<bf16>)
    for (int p = 0; p < kParts; ++p, out += 16) {
      const IReg first = load_words(lines + p * 8, kLanes), second = load_words(lines + kLine<bf16> + p * 8, kLanes);
      store_words(out, first_columns(first, second)), store_words(out + 8, last_columns(first, second));
    }
}
#endif

template <typename T>
void gemm_tile(const GemmTile<T>& tile, int rows, int blocks, int blocks_ahead) {
  kRun<T>[rows - 1][blocks - 1][blocks_ahead](tile);
}

template void gemm_tile(const GemmTile<bf16>&, int, int, int);
template void gemm_tile(const GemmTile<float>&, int, int, int);
template void gemm_tile(const GemmTile<fp8_weight>&, int, int, int);

}  // namespace starling
