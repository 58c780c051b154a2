// Registers of ARM's NEON: 4 floats. With bf16, a product of pairs is one instruction; with dotprod, one of 4 bytes. Two rows by two
// columns at once, of bf16 or of bytes (i8mm), are twice as many products.
#pragma once

#include <arm_neon.h>

#include "elements.h"

namespace starling {

constexpr int kLanes = 4;
typedef float32x4_t Reg;
typedef int32x4_t IReg;

inline Reg splat(float x) { return vdupq_n_f32(x); }
inline Reg load(const float* p) { return vld1q_f32(p); }
inline Reg load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&p->bits), 16)); }
inline Reg load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline IReg load_bytes(const void* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
inline void store(float* p, Reg v) { vst1q_f32(p, v); }
inline void stream(void* p, IReg v) { vst1q_s32(static_cast<int32_t*>(p), v); }
inline void end_of_stream() {}

inline Reg multiply_add(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
// A NaN in b stays, and one in a does not, as on x86.
inline Reg highest(Reg a, Reg b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Reg lowest(Reg a, Reg b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Reg nearest_whole(Reg v) { return vrndnq_f32(v); }
inline float sum_of(Reg v) { return vaddvq_f32(v); }
inline float highest_of(Reg v) { return vmaxvq_f32(v); }

inline uint32_t bits_of(uint32x4_t chosen) {
  const uint32x4_t bit = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(chosen, bit));
}
inline uint32_t above(Reg a, Reg b) { return bits_of(vcgtq_f32(a, b)); }
inline uint32_t at_least(Reg a, Reg b) { return bits_of(vcgeq_f32(a, b)); }
inline uint32_t unordered(Reg v) { return bits_of(vmvnq_u32(vceqq_f32(v, v))); }
inline Reg choose(uint32_t lanes, Reg yes, Reg no) {
  const uint32x4_t bit = {1, 2, 4, 8};
  return vbslq_f32(vtstq_u32(vdupq_n_u32(lanes), bit), yes, no);
}

inline void store_high_halves(bf16* p, IReg v) { vst1_u16(&p->bits, vshrn_n_u32(vreinterpretq_u32_s32(v), 16)); }

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define STARLING_BF16_PAIRS
inline Reg multiply_pairs(Reg sum, IReg a, IReg b) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b));
}
inline uint16x4_t to_bf16(Reg v) { return vreinterpret_u16_bf16(vcvt_bf16_f32(v)); }
inline void store(bf16* p, Reg v) { vst1_u16(&p->bits, to_bf16(v)); }
inline Reg rounded_to_bf16(Reg v) { return vreinterpretq_f32_u32(vshll_n_u16(to_bf16(v), 16)); }
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define STARLING_MATRICES
// A register of two rows or columns, 8 bytes of each; and the same of two columns, once they come in two registers of 4 columns.
inline IReg two_rows(const void* first, const void* second) {
  return vcombine_s32(vld1_s32(static_cast<const int32_t*>(first)), vld1_s32(static_cast<const int32_t*>(second)));
}
inline IReg first_columns(IReg a, IReg b) { return vzip1q_s32(a, b); }
inline IReg last_columns(IReg a, IReg b) { return vzip2q_s32(a, b); }
// Adds the products of two rows and two columns: to the sums of the first row, then of the second.
inline IReg multiply_matrices(IReg sums, IReg rows, IReg columns) {
  return vmmlaq_s32(sums, vreinterpretq_s8_s32(rows), vreinterpretq_s8_s32(columns));
}
inline Reg multiply_matrices(Reg sums, IReg rows, IReg columns) {
  return vbfmmlaq_f32(sums, vreinterpretq_bf16_s32(rows), vreinterpretq_bf16_s32(columns));
}
// The sums of the first (second) row: of the columns of a, then of b.
inline int64x2_t as_halves(IReg v) { return vreinterpretq_s64_s32(v); }
inline int64x2_t as_halves(Reg v) { return vreinterpretq_s64_f32(v); }
template <typename R>
inline R sums_of_first(R a, R b) { return (R)vzip1q_s64(as_halves(a), as_halves(b)); }
template <typename R>
inline R sums_of_second(R a, R b) { return (R)vzip2q_s64(as_halves(a), as_halves(b)); }
#endif

inline IReg broadcast_bytes(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
inline IReg look_up_bytes(IReg table, IReg codes) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(codes)));
}

// As for AVX-512 without VNNI.
constexpr bool kSignedBytes = true;
template <int BITS>
struct Quads {
  IReg sum;
  void begin(IReg with) { sum = with; }
  void add(IReg codes, IReg x) {
    const int8x16_t b = vreinterpretq_s8_s32(x);
    const int8x16_t a = BITS == 8 ? veorq_s8(vreinterpretq_s8_s32(codes), vdupq_n_s8(-128)) : vreinterpretq_s8_s32(codes);
#ifdef __ARM_FEATURE_DOTPROD
    sum = vdotq_s32(sum, a, b);
#else
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b))), high = vpaddlq_s16(vmull_high_s8(a, b));
    sum = vaddq_s32(sum, vpaddq_s32(low, high));
#endif
  }
  IReg total() const { return sum; }
};

// r[i] lane j becomes r[j] lane i.
inline void transpose(IReg (&r)[4]) {
  const int32x4x2_t low = vtrnq_s32(r[0], r[1]), high = vtrnq_s32(r[2], r[3]);
  r[0] = vcombine_s32(vget_low_s32(low.val[0]), vget_low_s32(high.val[0]));
  r[1] = vcombine_s32(vget_low_s32(low.val[1]), vget_low_s32(high.val[1]));
  r[2] = vcombine_s32(vget_high_s32(low.val[0]), vget_high_s32(high.val[0]));
  r[3] = vcombine_s32(vget_high_s32(low.val[1]), vget_high_s32(high.val[1]));
}

// out[i] is the sum of the lanes of v[i].
constexpr int kSums = 16;
inline void sums_of(Reg (&v)[kSums], float* out) {
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) store(out + i, vpaddq_f32(vpaddq_f32(v[i], v[i + 1]), vpaddq_f32(v[i + 2], v[i + 3])));
}

}  // namespace starling
