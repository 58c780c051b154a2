// Registers of ARM's NEON: 4 floats.
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
inline IReg load_bytes(const fp8* p) {
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
