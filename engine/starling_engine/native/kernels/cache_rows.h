// Rows of cached keys and values in 8 or 4 bits: codes, then the scales of each 32 columns (and their minima, with 4 bits), float16.
// `native/cache_rows.py` defines them.
#pragma once

#include <limits>

#include "fp8.h"

namespace starling {

// Storage types: a code with a sign, and two without, of column i, low, and of column i + 16.
struct int8_code {
  uint8_t bits;
};
struct int4_pair {
  uint8_t bits;
};

constexpr int64_t kRowGroup = 32;  // columns that share a scale

template <typename C>
constexpr bool kIsRow = false;
template <>
constexpr bool kIsRow<int8_code> = true;
template <>
constexpr bool kIsRow<int4_pair> = true;

// Elements of a row of `dim` columns in the cache.
template <typename C>
inline int64_t row_size(int64_t dim) {
  if constexpr (std::is_same_v<C, int8_code>) return dim + dim / kRowGroup * 2;
  if constexpr (std::is_same_v<C, int4_pair>) return dim / 2 + dim / kRowGroup * 4;
  return dim;
}

// Rounds to a float16; what is beyond the largest becomes that. NaN stays NaN. Returns what was written.
inline float store_half(uint8_t* p, int64_t i, float v) {
  const uint16_t bits = float_to_half(std::max(std::min(v, 65504.0f), -65504.0f));
  std::memcpy(p + 2 * i, &bits, sizeof bits);
  return half_to_float(bits);
}

// Writes 16 whole numbers as bytes.
inline void store_bytes(uint8_t* out, Floats v) {
  alignas(64) int32_t whole[16];
  for (int i = 0; i < kParts; ++i) store_words(whole + i * kLanes, __builtin_convertvector(v.part[i], IReg));
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(whole[i]);
}
inline Floats nearest_within(Floats v, float least, float most) {
  const Floats held = lowest(splat16(most), highest(splat16(least), v));
  return by_part([&](int i) { return nearest_whole(held.part[i]); });
}
// NaN where one of the two has what is not a number, else 0.
inline float broken(Floats a, Floats b) { return sum_of((a - a) + (b - b)); }

// dim is a multiple of 32. A group with what is not a number reads as NaN.
template <typename T>
inline void store_row(const T* in, int64_t dim, int8_code* row) {
  uint8_t *codes = &row->bits, *scales = codes + dim;
  for (int64_t g = 0; g < dim / kRowGroup; ++g, codes += kRowGroup) {
    const Floats a = load16(in + g * kRowGroup), b = load16(in + g * kRowGroup + 16), none = splat16(0.0f);
    const float top = highest_of(highest(highest(a, none - a), highest(b, none - b)));
    const float scale = store_half(scales, g, top / 127.0f + broken(a, b)), by = scale > 0 ? 1.0f / scale : 0.0f;
    store_bytes(codes, nearest_within(a * splat16(by), -127.0f, 127.0f));
    store_bytes(codes + 16, nearest_within(b * splat16(by), -127.0f, 127.0f));
  }
}
template <typename T>
inline void store_row(const T* in, int64_t dim, int4_pair* row) {
  uint8_t *codes = &row->bits, *scales = codes + dim / 2, *minima = scales + dim / kRowGroup * 2;
  for (int64_t g = 0; g < dim / kRowGroup; ++g, codes += 16) {
    const Floats a = load16(in + g * kRowGroup), b = load16(in + g * kRowGroup + 16), none = splat16(0.0f);
    const float top = highest_of(highest(a, b)), low = -highest_of(highest(none - a, none - b));
    const float minimum = store_half(minima, g, low);
    const float scale = store_half(scales, g, (top - minimum) / 15.0f + broken(a, b)), by = scale > 0 ? 1.0f / scale : 0.0f;
    uint8_t first[16], second[16];
    store_bytes(first, nearest_within((a - splat16(minimum)) * splat16(by), 0.0f, 15.0f));
    store_bytes(second, nearest_within((b - splat16(minimum)) * splat16(by), 0.0f, 15.0f));
    for (int i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(first[i] | second[i] << 4);
  }
}

// The float16 at the end of a row, as fp32: at most 32, for dim is at most 512.
struct Sides {
  alignas(64) float values[32];

  Sides(const uint8_t* halves, int64_t count) {
#ifdef __AVX512F__
    for (int64_t i = 0; i < count; i += 16)
      store(values + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count - i), halves + 2 * i)));
#else
    alignas(64) uint16_t bits[32] = {};
    std::memcpy(bits, halves, count * sizeof(uint16_t));
    for (int i = 0; i < 2 * kParts; ++i) store(values + i * kLanes, load_half(bits + i * kLanes));
#endif
  }
};

// 16 codes as numbers; `read` makes them of bytes without sign.
template <typename C, typename F>
inline Floats numbers(const C* codes, F read) {
  return by_part([&](int i) { return __builtin_convertvector(read(load_bytes(codes + i * kLanes)), Reg); });
}
template <typename T>
inline void load_row(const int8_code* row, int64_t dim, T* out) {
  const int64_t groups = dim / kRowGroup;
  const Sides scales(&row->bits + dim, groups);
  for (int64_t g = 0; g < groups; ++g, row += kRowGroup, out += kRowGroup) {
    const Floats scale = splat16(scales.values[g]);
    const auto read = [](IReg bytes) { return (bytes ^ 128) - 128; };
    store16(out, numbers(row, read) * scale);
    store16(out + 16, numbers(row + 16, read) * scale);
  }
}
template <typename T>
inline void load_row(const int4_pair* row, int64_t dim, T* out) {
  const int64_t groups = dim / kRowGroup;
  const Sides sides(&row->bits + dim / 2, 2 * groups);
  for (int64_t g = 0; g < groups; ++g, row += 16, out += kRowGroup) {
    const Floats scale = splat16(sides.values[g]), minimum = splat16(sides.values[groups + g]);
    store16(out, multiply_add(numbers(row, [](IReg bytes) { return bytes & 15; }), scale, minimum));
    store16(out + 16, multiply_add(numbers(row, [](IReg bytes) { return bytes >> 4; }), scale, minimum));
  }
}

// Converts rows that follow one another to T.
template <typename C, typename T>
inline void load_rows(const C* in, int64_t rows, int64_t dim, T* out) {
  if constexpr (kIsRow<C>) {
    for (int64_t i = 0; i < rows; ++i) load_row(in + i * row_size<C>(dim), dim, out + i * dim);
  } else {
    unpack(in, rows * dim, out);
  }
}

// Calls f(T, C) with the types of what is computed, and of a cache of that kind; see `_CACHES` in ops.py.
template <typename F>
inline void with_types(int fp32, int cache, const F& f) {
  const auto with = [&](auto type) {
    switch (cache) {
      case 1: return f(type, fp8{});
      case 2: return f(type, int8_code{});
      case 3: return f(type, int4_pair{});
      default: return f(type, type);
    }
  };
  fp32 ? with(float{}) : with(bf16{});
}

}  // namespace starling
