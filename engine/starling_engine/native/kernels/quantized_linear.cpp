// y = x W^T + b with W in 4 or 8 bits: groups of 32 columns of a row share a scale (and perhaps a minimum). Rows of x are quantized
// to 8 bits, by groups of 32 too, so that products and their sums are whole numbers within a group. (The arithmetic is llama.cpp's
// for its types of 32.)
//
// W is packed in blocks of 16 rows. A group of a block is 32 x 16 codes in lines of 64 bytes, each with 4 columns of 16 rows: the
// bytes that one instruction multiplies by 4 bytes of x. With 4 bits, line l has columns 4 l to 4 l + 3 in the low halves of its
// bytes, and those 16 further in the high ones.
#include <cmath>
#include <limits>

#include "linear.h"

namespace starling {
namespace {

constexpr int64_t kGroup = 32;
constexpr int64_t kQuads = kGroup / 4;
constexpr float kNothing = 1e-30f;
constexpr int kQuantizedRows = kLanes == 16 ? 8 : 4;

#ifdef STARLING_BYTE_PAIRS
// Quads by products of bytes that are added in pairs, in 16 bits: those of 8 bits by their magnitudes, or they would not fit.
constexpr bool kSignedBytes = true;
template <int BITS>
struct Quads {
  IReg sum = IReg{};
  void add(IReg codes, IReg x) {
    const IReg numbers = codes ^ static_cast<int32_t>(0x80808080);
    sum = sum + add_pairs(multiply_bytes(magnitudes(numbers), with_signs(x, numbers)));
  }
  IReg total() const { return sum; }
};
// The 8 quads of a group fit in 16 bits: 8 * 2 * 15 * 127.
template <>
struct Quads<4> {
  Pairs sum = Pairs{};
  void add(IReg codes, IReg x) { sum = sum + multiply_bytes(codes, x); }
  IReg total() const { return add_pairs(sum); }
};
#endif

template <int BITS>
constexpr int64_t kGroupBytes = kGroup * kBlockCols * BITS / 8;

// Rows of x in 8 bits. A product with unsigned codes is too large by `zero` times the sum of the row's group, so that is
// taken from it.
struct QuantizedRows {
  int8_t* codes;    // [m][k]
  float* scales;    // [m][k / 32]
  int32_t* begins;  // the same
  float* sums;      // the same: of the values
  int64_t k;

  static size_t bytes(int64_t m, int64_t k) {
    return Scratch::padded<int8_t>(m * k) + 3 * Scratch::padded<float>(m * (k / kGroup));
  }
  static QuantizedRows in(Scratch& scratch, int64_t m, int64_t k) {
    const int64_t n = m * (k / kGroup);
    return {scratch.take<int8_t>(m * k), scratch.take<float>(n), scratch.take<int32_t>(n), scratch.take<float>(n), k};
  }

  template <typename T>
  void quantize(int64_t row, const T* x, int32_t zero) const {
    for (int64_t g = 0; g < k / kGroup; ++g, x += kGroup) {
      const Floats low = load16(x), high = load16(x + 16), none = splat16(0.0f);
      const float top = highest_of(highest(highest(low, none - low), highest(high, none - high)));
      // Rows of less than kNothing are zeros: 127 / top would not be finite.
      const float scale = top / 127.0f, by = top > kNothing ? 127.0f / top : 0.0f;
      int8_t* out = codes + row * k + g * kGroup;
      const int32_t sum = store_codes(out, low * splat16(by)) + store_codes(out + 16, high * splat16(by));
      const int64_t at = row * (k / kGroup) + g;
      // A row with what is not a number has sums that show it.
      scales[at] = sum_of((low - low) + (high - high)) == 0.0f ? scale : std::numeric_limits<float>::quiet_NaN();
      begins[at] = -zero * sum;
      sums[at] = scales[at] * static_cast<float>(sum);
    }
  }

 private:
  // Rounds 16 numbers within +-127, and returns their sum.
  static int32_t store_codes(int8_t* out, Floats v) {
    alignas(64) int32_t whole[16];
    for (int i = 0; i < kParts; ++i) store_words(whole + i * kLanes, __builtin_convertvector(nearest_whole(v.part[i]), IReg));
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) out[i] = static_cast<int8_t>(whole[i]), sum += out[i];
    return sum;
  }
};

struct QuantizedWeight {
  const uint8_t* codes;    // [ceil(n / 16)][k / 32][kGroupBytes]
  const uint16_t* scales;  // [ceil(n / 16)][k / 32][16] fp16
  const uint16_t* minima;  // the same, or null
  int64_t n, k;

  int64_t groups() const { return k / kGroup; }
};

// The codes of one quad of 4 columns in each lane, as bytes without sign.
template <int BITS>
inline IReg quad(const uint8_t* group, int q, int part) {
  const int line = BITS == 8 ? q : q % (kQuads / 2);
  const IReg bytes = load_words(group + line * 64 + part * kLanes * 4, kLanes);
  if (BITS == 8) return bytes;
  return (q < kQuads / 2 ? bytes : (IReg)((UReg)bytes >> 4)) & 0x0F0F0F0F;
}

// c[rows][16] of the rows from `row` on and one block.
template <int BITS, int ROWS>
void run_tile(const QuantizedRows& x, int64_t row, const QuantizedWeight& w, int64_t block, float* c, ptrdiff_t c_stride) {
  const int64_t groups = w.groups();
  Reg total[ROWS][kParts];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) total[i][p] = splat(0.0f);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = block * groups + g;
    const uint8_t* codes = w.codes + at * kGroupBytes<BITS>;
    const int8_t* a = x.codes + row * x.k + g * kGroup;
    Quads<BITS> sum[ROWS][kParts];
#pragma GCC unroll 8
    for (int q = 0; q < kQuads; ++q) {
      IReg weights[kParts];
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) weights[p] = quad<BITS>(codes, q, p);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        int32_t four;
        std::memcpy(&four, a + i * x.k + q * 4, sizeof four);
#pragma GCC unroll 4
        for (int p = 0; p < kParts; ++p) sum[i][p].add(weights[p], IReg{} + four);
      }
    }
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const Reg scale = load_half(w.scales + at * kBlockCols + p * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Reg by = scale * splat(x.scales[(row + i) * groups + g]);
        const IReg sums = sum[i][p].total() + x.begins[(row + i) * groups + g];
        total[i][p] = multiply_add(__builtin_convertvector(sums, Reg), by, total[i][p]);
      }
      if (w.minima == nullptr) continue;
      const Reg minimum = load_half(w.minima + at * kBlockCols + p * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
        total[i][p] = multiply_add(minimum, splat(x.sums[(row + i) * groups + g]), total[i][p]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) store(c + i * c_stride + p * kLanes, total[i][p]);
}

using RunTile = void (*)(const QuantizedRows&, int64_t, const QuantizedWeight&, int64_t, float*, ptrdiff_t);
template <int BITS, int ROWS>
constexpr RunTile run_with() {
  if constexpr (ROWS <= kQuantizedRows) return run_tile<BITS, ROWS>;
  return nullptr;
}
template <int BITS>
constexpr RunTile kRunTile[8] = {run_with<BITS, 1>(), run_with<BITS, 2>(), run_with<BITS, 3>(), run_with<BITS, 4>(),
                                 run_with<BITS, 5>(), run_with<BITS, 6>(), run_with<BITS, 7>(), run_with<BITS, 8>()};

// Two blocks at a time: those of a gated layer make 16 columns together. Their weights stay in the second-level cache for all rows.
template <int BITS, typename Out>
void run(const QuantizedRows& x, int64_t m, const QuantizedWeight& w, const StoreSums<Out>& store_sums, int threads) {
  const int64_t blocks = ceil_div(w.n, kBlockCols), pairs = ceil_div(blocks, 2);
  const int64_t tiles = ceil_div(m, kQuantizedRows), step = ceil_div(m, tiles);
  parallel_for(pairs, threads_for(pairs, w.n * w.k * BITS / 8 * tiles, threads), [&](int64_t pair) {
    alignas(64) float sums[kQuantizedRows][2 * kBlockCols];
    const int64_t here = std::min<int64_t>(2, blocks - pair * 2), col = pair * 2 * kBlockCols;
    for (int64_t row = 0; row < m; row += step) {
      const int64_t rows = std::min(step, m - row);
      for (int64_t b = 0; b < here; ++b)
        kRunTile<BITS>[rows - 1](x, row, w, pair * 2 + b, sums[0] + b * kBlockCols, 2 * kBlockCols);
      store_sums(sums[0], 2 * kBlockCols, row, rows, col, std::min(here * kBlockCols, w.n - col));
    }
  });
}

// Packs a block of 16 rows of codes, one a byte: row i is at rows[i], null past the last.
template <int BITS>
void pack_block(const uint8_t* const* rows, int64_t k, uint8_t* out) {
  for (int64_t g = 0; g < k; g += kGroup, out += kGroupBytes<BITS>) {
    std::memset(out, 0, kGroupBytes<BITS>);
    for (int64_t i = 0; i < kBlockCols; ++i)
      for (int64_t j = 0; rows[i] != nullptr && j < kGroup; ++j) {
        const int64_t half = BITS == 8 ? 0 : j / (kGroup / 2), within = BITS == 8 ? j : j % (kGroup / 2);
        out[within / 4 * 64 + i * 4 + within % 4] |= static_cast<uint8_t>(rows[i][g + j] << (4 * half));
      }
  }
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// Codes [n, k], one a byte, and scales [n, k / 32] fp16 (minima the same, or null) -> the packed form. With 4 bits codes are 0 to 15,
// with 8 the numbers plus 128. k is a multiple of 32; n is one of 16 where gated: a block then has 8 rows of the gate and 8 of up.
void starling_pack_quantized(const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, int64_t n, int64_t k, int bits,
                             int gated, uint8_t* out, uint16_t* out_scales, uint16_t* out_minima, int threads) {
  const int64_t groups = k / kGroup;
  parallel_for(ceil_div(n, kBlockCols), threads, [&](int64_t block) {
    const uint8_t* rows[kBlockCols];
    for (int64_t i = 0; i < kBlockCols; ++i) {
      const int64_t row = !gated ? block * 16 + i : block * 8 + i % 8 + (i < 8 ? 0 : n / 2);
      rows[i] = row < n ? codes + row * k : nullptr;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t to = (block * groups + g) * kBlockCols + i;
        out_scales[to] = row < n ? scales[row * groups + g] : 0;
        if (minima) out_minima[to] = row < n ? minima[row * groups + g] : 0;
      }
    }
    bits == 4 ? pack_block<4>(rows, k, out + block * groups * kGroupBytes<4>)
              : pack_block<8>(rows, k, out + block * groups * kGroupBytes<8>);
  });
}

// x [m, k] bf16 (rows x_stride elements apart) -> out [m, n], or gated [m, n / 2], bf16 or fp32. `zero` is the code of 0. `bias` may
// be null.
void starling_quantized_linear(const bf16* x, int64_t x_stride, int64_t m, const uint8_t* codes, const uint16_t* scales,
                               const uint16_t* minima, int64_t n, int64_t k, int bits, int zero, const bf16* bias, int gated,
                               void* out, int out_fp32, int threads) {
  if (m == 0) return;
  Scratch& scratch = Scratch::mine();
  scratch.reset(QuantizedRows::bytes(m, k));
  const QuantizedRows rows = QuantizedRows::in(scratch, m, k);
  const int32_t begin = bits == 8 && kSignedBytes ? 0 : zero;
  parallel_for(m, threads_for(m, m * k * sizeof(bf16), threads),
               [&](int64_t row) { rows.quantize(row, x + row * x_stride, begin); });
  const QuantizedWeight weight{codes, scales, minima, n, k};
  const auto to = [&](auto type) {
    const StoreSums<decltype(type)> store_sums{bias, n, gated != 0, static_cast<decltype(type)*>(out)};
    bits == 4 ? run<4>(rows, m, weight, store_sums, threads) : run<8>(rows, m, weight, store_sums, threads);
  };
  out_fp32 ? to(float{}) : to(bf16{});
}

// Rows `ids` of the packed weight -> out [tokens, k].
void starling_embedding_quantized(const int64_t* ids, int64_t tokens, const uint8_t* codes, const uint16_t* scales,
                                  const uint16_t* minima, int64_t k, int bits, int zero, bf16* out, int threads) {
  const int64_t groups = k / kGroup, group_bytes = bits == 4 ? kGroupBytes<4> : kGroupBytes<8>;
  parallel_for(tokens, threads_for(tokens, tokens * k * 32, threads), [&](int64_t t) {
    const int64_t block = ids[t] / kBlockCols, lane = ids[t] % kBlockCols;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = block * groups + g;
      const float scale = half_to_float(scales[at * kBlockCols + lane]);
      const float minimum = minima ? half_to_float(minima[at * kBlockCols + lane]) : 0.0f;
      alignas(64) float values[kGroup];
      for (int64_t j = 0; j < kGroup; ++j) {
        const int64_t within = bits == 8 ? j : j % (kGroup / 2);
        const uint8_t byte = codes[at * group_bytes + within / 4 * 64 + lane * 4 + within % 4];
        const int code = bits == 8 ? byte : j < kGroup / 2 ? byte & 15 : byte >> 4;
        values[j] = scale * static_cast<float>(code - zero) + minimum;
      }
      store16(out + t * k + g * kGroup, load16(values));
      store16(out + t * k + g * kGroup + 16, load16(values + 16));
    }
  });
}

}  // extern "C"
