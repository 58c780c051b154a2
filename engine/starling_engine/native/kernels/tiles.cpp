// Whether this CPU's tiles give what its registers do: asked when a library with tiles is loaded, before anything relies on them. And
// how fast they are, for benchmarks.
#include "linear.h"

using namespace starling;

extern "C" {

void starling_pack_linear(const bf16* w, int64_t n, int64_t k, bf16* out, int gated, int threads);
void starling_linear(const bf16* x, int64_t x_stride, int64_t m, const bf16* packed, int64_t n, int64_t k, const bf16* bias,
                     int gated, void* out, int out_fp32, int threads);
void starling_pack_quantized(const uint8_t* codes, const uint16_t* scales, const uint16_t* minima, const uint8_t* table, int64_t n,
                             int64_t k, int64_t size, int64_t span, int64_t share, int bits, int gated, uint8_t* out,
                             uint16_t* out_scales, uint16_t* out_minima, int threads);
void starling_quantized_linear(const bf16* x, int64_t x_stride, int64_t m, const uint8_t* codes, const uint16_t* scales,
                               const uint16_t* minima, const uint8_t* table, int64_t n, int64_t k, int64_t size, int64_t span,
                               int64_t share, int bits, int zero, const bf16* bias, int gated, void* out, int64_t out_stride,
                               int out_fp32, int threads);
}

#ifdef STARLING_TILES
namespace {

// More k than are multiplied at once, whole groups of 128, and rows that do not fill their tiles.
constexpr int64_t kRows = 40, kWidth = 1152, kColumns = 48, kGroups = kWidth / 128;
bf16 x[kRows * kWidth], w[kColumns * kWidth];
float by_tiles_of_all[kRows * kColumns], alone[kColumns];
alignas(64) uint8_t packed[kColumns * kWidth * sizeof(bf16)];

uint32_t next(uint32_t& seed) { return (seed = seed * 1664525u + 1013904223u) >> 24; }

// Small whole numbers: every order of sums is exact.
void fill(bf16* out, int64_t n, uint32_t seed) {
  for (int64_t i = 0; i < n; ++i) {
    const float number = static_cast<float>(static_cast<int>(next(seed) >> 4) - 8);
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    out[i].bits = static_cast<uint16_t>(bits >> 16);
  }
}

// `multiply(first, count, out)` multiplies some rows; a single one goes by registers.
template <typename Multiply>
bool same(const Multiply& multiply) {
  multiply(0, kRows, by_tiles_of_all);
  for (int64_t row = 0; row < kRows; ++row) {
    multiply(row, 1, alone);
    if (std::memcmp(alone, by_tiles_of_all + row * kColumns, sizeof alone) != 0) return false;
  }
  return true;
}

bool bf16_works() {
  fill(w, kColumns * kWidth, 2);
  bf16* matrix = reinterpret_cast<bf16*>(packed);
  starling_pack_linear(w, kColumns, kWidth, matrix, 0, 1);
  return same([&](int64_t first, int64_t count, float* out) {
    starling_linear(x + first * kWidth, kWidth, count, matrix, kColumns, kWidth, nullptr, 0, out, 1, 1);
  });
}

// Codes of 8 bits, in which bytes have every value.
bool bytes_work() {
  static uint8_t codes[kColumns * kWidth];
  static uint16_t scales[kColumns * kGroups], packed_scales[kColumns * kGroups];
  uint32_t seed = 3;
  for (uint8_t& code : codes) code = static_cast<uint8_t>(next(seed));
  for (uint16_t& scale : scales) scale = float_to_half(static_cast<float>(next(seed) + 1) / 256.0f);
  starling_pack_quantized(codes, scales, nullptr, nullptr, kColumns, kWidth, 32, 4, 1, 8, 0, packed, packed_scales, nullptr, 1);
  return same([&](int64_t first, int64_t count, float* out) {
    starling_quantized_linear(x + first * kWidth, kWidth, count, packed, packed_scales, nullptr, nullptr, kColumns, kWidth, 32, 4, 1, 8,
                              128, nullptr, 0, out, kColumns, 1, 1);
  });
}

// The loop of a product, whose columns stay in the first-level cache. They are no zeros, which are multiplied 1.2 times as fast.
template <typename T>
void multiply_in_cache(int64_t times) {
  alignas(64) static thread_local T rows[2 * kTileBytes / sizeof(T)], columns[2 * kStepsAtOnce * kTileBytes / sizeof(T)];
  uint32_t seed = 4;
  const auto any = [&](T& out) {
    if constexpr (sizeof(T) == 1)
      out = static_cast<T>(next(seed));
    else
      out.bits = static_cast<uint16_t>(0x3F00 + next(seed) + (next(seed) & 1) * 0x8000);  // of either sign, from 0.5 to 2
  };
  for (T& out : rows) any(out);
  for (T& out : columns) any(out);
  TilesInUse in_use;
  (void)in_use;
  Ahead nothing;
  zero_sums<2, 2>();
  for (int64_t i = 0; i < times; ++i)
    add_products<T, 2, 2, false>({rows, 64, 0}, {rows + kTileBytes / sizeof(T), 64, 0}, columns, kStepsAtOnce * kTileBytes, kStepsAtOnce,
                          nothing);
}

}  // namespace
#endif

// Multiplies 32 rows by 32 columns of 1024 bytes, `times` times on each thread. Without tiles it does nothing.
extern "C" void starling_multiply_in_cache(int64_t times, int bytes, int threads) {
#ifdef STARLING_TILES
  in_parallel(threads, [&](Part) { bytes ? multiply_in_cache<int8_t>(times) : multiply_in_cache<bf16>(times); });
#else
  (void)times, (void)bytes, (void)threads;
#endif
}

// Without tiles, there is nothing to compare.
extern "C" int starling_tiles_work() {
#ifdef STARLING_TILES
  fill(x, kRows * kWidth, 1);
  return bf16_works() && bytes_work();
#else
  return 1;
#endif
}
