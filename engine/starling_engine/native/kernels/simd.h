// Vectors of 16 floats, a cache line of fp32, on any instruction set: as many registers as that takes. `registers_*.h` have what
// differs between sets. A few functions, here and in kernels, have a second form for AVX-512, which masks lanes.
#pragma once

#include <algorithm>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "registers_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "registers_avx2.h"
#elif defined(__aarch64__)
#include "registers_neon.h"
#else
#error "the native kernels need AVX2 with FMA, AVX-512 or ARM's NEON; build.py must not compile them for this CPU"
#endif

namespace starling {

constexpr int kParts = 16 / kLanes;
// Processors with AVX-512, and ARM's, have 32 registers; AVX2 has 16.
constexpr int kRegisters = kLanes == 8 ? 16 : 32;

typedef uint32_t UReg __attribute__((vector_size(4 * kLanes), may_alias));

struct Floats {
  Reg part[kParts];
};

// The type in which rows are multiplied by bf16: pairs of bf16 where there is an instruction for these, else fp32.
#ifdef STARLING_BF16_PAIRS
constexpr bool kPairs = true;
typedef bf16 Bf16Operand;
#else
constexpr bool kPairs = false;
typedef float Bf16Operand;
#endif

template <typename T>
struct OperandOf {
  typedef T Type;
};
template <>
struct OperandOf<bf16> {
  typedef Bf16Operand Type;
};
template <typename T>
using Operand = typename OperandOf<T>::Type;

template <typename F>
inline Floats by_part(F f) {
  Floats out;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) out.part[i] = f(i);
  return out;
}
template <typename F>
inline uint32_t lanes_by_part(F f) {
  uint32_t out = 0;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) out |= f(i) << (i * kLanes);
  return out;
}

inline Floats splat16(float x) {
  return by_part([x](int) { return splat(x); });
}
inline Floats operator+(Floats a, Floats b) {
  return by_part([&](int i) { return a.part[i] + b.part[i]; });
}
inline Floats operator-(Floats a, Floats b) {
  return by_part([&](int i) { return a.part[i] - b.part[i]; });
}
inline Floats operator*(Floats a, Floats b) {
  return by_part([&](int i) { return a.part[i] * b.part[i]; });
}
inline Floats operator/(Floats a, Floats b) {
  return by_part([&](int i) { return a.part[i] / b.part[i]; });
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return by_part([&](int i) { return multiply_add(a.part[i], b.part[i], c.part[i]); });
}
// Where one of them is NaN, the second argument.
inline Floats highest(Floats a, Floats b) {
  return by_part([&](int i) { return highest(a.part[i], b.part[i]); });
}
inline Floats lowest(Floats a, Floats b) {
  return by_part([&](int i) { return lowest(a.part[i], b.part[i]); });
}

inline Lanes above(Floats a, Floats b) {
  return lanes_by_part([&](int i) { return above(a.part[i], b.part[i]); });
}
inline Lanes at_least(Floats a, Floats b) {
  return lanes_by_part([&](int i) { return at_least(a.part[i], b.part[i]); });
}
inline Lanes unordered(Floats v) {
  return lanes_by_part([&](int i) { return unordered(v.part[i]); });
}
inline Floats choose(Lanes lanes, Floats yes, Floats no) {
  return by_part([&](int i) { return choose(lanes >> (i * kLanes), yes.part[i], no.part[i]); });
}

// The first (second) eight of a, then of b.
inline Floats low_halves(Floats a, Floats b) {
#ifdef __AVX512F__
  return {{_mm512_shuffle_f32x4(a.part[0], b.part[0], 0x44)}};
#else
  return by_part([&](int i) { return i < kParts / 2 ? a.part[i] : b.part[i - kParts / 2]; });
#endif
}
inline Floats high_halves(Floats a, Floats b) {
#ifdef __AVX512F__
  return {{_mm512_shuffle_f32x4(a.part[0], b.part[0], 0xEE)}};
#else
  return by_part([&](int i) { return i < kParts / 2 ? a.part[i + kParts / 2] : b.part[i]; });
#endif
}

inline float sum_of(Floats v) {
  Reg sum = v.part[0];
  for (int i = 1; i < kParts; ++i) sum = sum + v.part[i];
  return sum_of(sum);
}
inline float highest_of(Floats v) {
  Reg top = v.part[0];
  for (int i = 1; i < kParts; ++i) top = highest(top, v.part[i]);
  return highest_of(top);
}

#ifndef STARLING_BF16_PAIRS
// The nearest bf16, in the high half of each lane.
inline IReg nearest_bf16(Reg v) {
  const IReg bits = (IReg)v, up = bits + 0x7FFF + (bits >> 16 & 1), quiet = bits | 1 << 22;
  return (v == v ? up : quiet) & ~0xFFFF;
}
inline Reg rounded_to_bf16(Reg v) { return (Reg)nearest_bf16(v); }
inline void store(bf16* p, Reg v) { store_high_halves(p, nearest_bf16(v)); }
#endif

inline uint16_t float_to_half(float x) {
#ifdef __aarch64__
  const __fp16 half = static_cast<__fp16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
#else
  return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#endif
}
inline float half_to_float(uint16_t bits) {
  const uint16_t lanes[kLanes] = {bits};
  alignas(64) float out[kLanes];
  store(out, load_half(lanes));
  return out[0];
}

// 16 elements as fp32, rounded to nearest even on the way back. NaN stays NaN.
template <typename T>
inline Floats load16(const T* p) {
  return by_part([p](int i) { return load(p + i * kLanes); });
}
template <typename T>
inline void store16(T* p, Floats v) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) store(p + i * kLanes, v.part[i]);
}
#ifndef __AVX512BF16__
inline IReg pairs_of(Reg low, Reg high) {
  return (IReg)((UReg)(IReg)rounded_to_bf16(low) >> 16) | (IReg)rounded_to_bf16(high);
}
#endif

// A whole line of bf16 at once where there are such registers: nothing of it is read from memory first.
template <typename T>
inline void store32(T* p, Floats first, Floats second) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, bf16>) return store_line(p, first.part[0], second.part[0]);
#endif
  store16(p, first), store16(p + 16, second);
}

// The same for the given lanes. Nothing is read, and nothing written, in the others; they are zeros.
template <typename T>
inline Floats load16(const T* p, Lanes lanes) {
#ifdef __AVX512F__
  return {{load_some(p, lanes)}};
#else
  if (lanes == kAllLanes) return load16(p);
  alignas(64) T some[16] = {};
  for (int i = 0; i < 16; ++i)
    if (lanes >> i & 1) some[i] = p[i];
  return load16(some);
#endif
}
template <typename T>
inline void store16(T* p, Floats v, Lanes lanes) {
  if (lanes == kAllLanes) return store16(p, v);
  alignas(64) T some[16];
  store16(some, v);
  for (int i = 0; i < 16; ++i)
    if (lanes >> i & 1) p[i] = some[i];
}
#ifdef __AVX512F__
inline void store16(float* p, Floats v, Lanes lanes) { store_some(p, v.part[0], lanes); }
inline void store16(bf16* p, Floats v, Lanes lanes) {
#ifdef __AVX512BF16__
  _mm256_mask_storeu_epi16(p, lanes, to_bf16(v.part[0]));
#else
  store_high_halves(p, (IReg)rounded_to_bf16(v.part[0]), lanes);
#endif
}
#endif

// Writes the given lanes, one behind the other, and returns how many. Up to 15 floats behind them are overwritten.
inline int64_t pack16(float* p, Floats v, Lanes lanes) {
#ifdef __AVX512F__
  store(p, _mm512_maskz_compress_ps(lanes, v.part[0]));
#else
  alignas(64) float all[16];
  store16(all, v);
  for (uint32_t left = lanes; left != 0; left &= left - 1) *p++ = all[__builtin_ctz(left)];
#endif
  return __builtin_popcount(lanes);
}

// Copies n elements in another type, or the same; up to 15 behind them are overwritten.
inline void unpack(const bf16* in, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) store16(out + i, load16(in + i, first_lanes(n - i)));
}
template <typename T>
inline void unpack(const T* in, int64_t n, T* out) {
  std::memcpy(out, in, n * sizeof(T));
}

// The value of v after it is stored as T and read again.
template <typename T>
inline Floats rounded(Floats v);
template <>
inline Floats rounded<float>(Floats v) { return v; }
template <>
inline Floats rounded<bf16>(Floats v) {
  return by_part([&](int i) { return rounded_to_bf16(v.part[i]); });
}

// Calls f(offset, lanes) for each 16 of [0, n); the last may be fewer.
template <typename F>
inline void each_16(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += 16) f(i, first_lanes(n - i));
}

// 2^x to about 2 ulp (Cephes' degree-5 polynomial on [-0.5, 0.5]); 0 below -126, so -inf works as a mask. NaN gives NaN.
inline Reg exp2(Reg x) {
  // At 128 the polynomial is exactly 1, and the result infinite.
  const Reg held = lowest(splat(128.0f), x), whole = nearest_whole(held), f = held - whole;
  Reg y = splat(1.535336188319500e-4f);
  for (const float c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                        6.931472028550421e-1f, 1.0f})
    y = multiply_add(y, f, splat(c));
  const IReg power = __builtin_convertvector(whole, IReg) << 23;
  return x < splat(-126.0f) ? splat(0.0f) : (Reg)((IReg)y + power);
}
inline Floats exp2(Floats x) {
  return by_part([&](int i) { return exp2(x.part[i]); });
}

constexpr float kLog2E = 1.4426950408889634f;

inline Floats exp(Floats x) { return exp2(x * splat16(kLog2E)); }

inline Floats sigmoid(Floats x) { return splat16(1.0f) / (splat16(1.0f) + exp(splat16(0.0f) - x)); }

inline Floats silu(Floats x) { return x / (splat16(1.0f) + exp(splat16(0.0f) - x)); }

// GELU's approximation by tanh: (1 + tanh(y)) / 2 is the sigmoid of 2 y.
inline Floats tanh_gelu(Floats x) {
  const Floats one = splat16(1.0f), twice = x * splat16(1.5957691216f) * multiply_add(x * x, splat16(0.044715f), one);
  return x / (one + exp(splat16(0.0f) - twice));
}

// log(1 + exp(x)): max(x, 0) + log(1 + e), with e = exp(-|x|). That is 2 atanh(e / (2 + e)), whose argument is at most a third.
inline Floats softplus(Floats x) {
  const Floats zero = splat16(0.0f), e = exp(zero - highest(zero - x, x)), s = e / (splat16(2.0f) + e), square = s * s;
  Floats sum = splat16(2.0f / 15);
  for (const float odd : {13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) sum = multiply_add(sum, square, splat16(2.0f / odd));
  return multiply_add(sum, s, highest(zero, x));
}

// The first `count` words of 32 bits, zeros in the other lanes.
inline IReg load_words(const void* p, int64_t count) {
#ifdef __AVX512F__
  return (IReg)_mm512_maskz_loadu_epi32(first_lanes(count), p);
#else
  if (count >= kLanes) return (IReg)load(static_cast<const float*>(p));
  alignas(64) float some[kLanes] = {};
  std::memcpy(some, p, std::max<int64_t>(0, count) * sizeof(float));
  return (IReg)load(some);
#endif
}

// Word w of 16 rows becomes line w of `out`. There are at most 16 words of 32 bits; a row that is null has zeros. `write` takes an
// address and a register.
template <typename T, typename Write>
inline void transpose16(const T* const* rows, int64_t words, int32_t* out, Write write) {
  for (int column = 0; column < 16; column += kLanes)
    for (int row = 0; row < 16 && column < words; row += kLanes) {
      IReg r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        r[i] = rows[row + i] ? load_words(reinterpret_cast<const int32_t*>(rows[row + i]) + column, words - column) : IReg{};
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        if (column + i < words) write(out + (column + i) * 16 + row, r[i]);
    }
}

inline void store_words(void* p, IReg v) { store(static_cast<float*>(p), (Reg)v); }

inline void fetch(const void* line) { __builtin_prefetch(line); }

// Tells the processor that this thread waits for another.
inline void relax() {
#ifdef __aarch64__
  asm volatile("yield");
#else
  _mm_pause();
#endif
}

}  // namespace starling
