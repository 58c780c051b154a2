// Registers of AVX-512 (F, BW, DQ, VL): 16 floats. With BF16, a product of pairs is one instruction.
#pragma once

#include <immintrin.h>

#include "elements.h"

namespace starling {

constexpr int kLanes = 16;
typedef __m512 Reg;
typedef int32_t IReg __attribute__((vector_size(64), may_alias));

inline Reg splat(float x) { return _mm512_set1_ps(x); }
inline Reg load(const float* p) { return _mm512_loadu_ps(p); }
inline Reg load(const bf16* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Reg load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline IReg load_bytes(const void* p) {
  return (IReg)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline void store(float* p, Reg v) { _mm512_storeu_ps(p, v); }
inline void stream(void* p, IReg v) { _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v); }
inline void end_of_stream() { _mm_sfence(); }

inline Reg multiply_add(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
inline Reg highest(Reg a, Reg b) { return _mm512_max_ps(a, b); }
inline Reg lowest(Reg a, Reg b) { return _mm512_min_ps(a, b); }
inline Reg nearest_whole(Reg v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum_of(Reg v) { return _mm512_reduce_add_ps(v); }
inline float highest_of(Reg v) { return _mm512_reduce_max_ps(v); }

inline uint32_t above(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline uint32_t at_least(Reg a, Reg b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline uint32_t unordered(Reg v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }
inline Reg choose(uint32_t lanes, Reg yes, Reg no) { return _mm512_mask_mov_ps(no, static_cast<__mmask16>(lanes), yes); }

inline void store_high_halves(bf16* p, IReg v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)v, 16)));
}

inline Reg load_some(const float* p, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
inline Reg load_some(const bf16* p, Lanes lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
}
inline void store_some(float* p, Reg v, Lanes lanes) { _mm512_mask_storeu_ps(p, lanes, v); }
inline void store_high_halves(bf16* p, IReg v, Lanes lanes) {
  _mm256_mask_storeu_epi16(p, lanes, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)v, 16)));
}

#ifdef __AVX512BF16__
#define STARLING_BF16_PAIRS
// Adds, to each lane, the products of a pair of bf16.
inline Reg multiply_pairs(Reg sum, IReg a, IReg b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

inline __m256i to_bf16(Reg v) { return (__m256i)_mm512_cvtneps_pbh(v); }
inline void store(bf16* p, Reg v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v)); }
// Two numbers of each lane, side by side.
inline IReg pairs_of(Reg low, Reg high) {
  alignas(64) static constexpr int16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (IReg)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
inline void store_line(bf16* p, Reg first, Reg second) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first)); }
inline Reg rounded_to_bf16(Reg v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bf16(v)), 16)); }
#endif

// 16 bytes in each quarter, and for each byte of `codes`, 0 to 15, one of its quarter.
inline IReg broadcast_bytes(const uint8_t* p) {
  return (IReg)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline IReg look_up_bytes(IReg table, IReg codes) { return (IReg)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes); }

// Sums of products of 4 bytes of `codes`, without sign, and 4 of `x`, with sign and not -128, in each lane. Codes
// of 8 bits are numbers plus 128. Where kSignedBytes, 128 is subtracted from them here, and sums need no correction.
#ifdef __AVX512VNNI__
constexpr bool kSignedBytes = false;
template <int BITS>
struct Quads {
  IReg sum;
  void begin(IReg with) { sum = with; }
  void add(IReg codes, IReg x) { sum = (IReg)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x); }
  IReg total() const { return sum; }
};
#else
#define STARLING_BYTE_PAIRS
typedef int16_t Pairs __attribute__((vector_size(64), may_alias));
inline Pairs multiply_bytes(IReg codes, IReg x) { return (Pairs)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x); }
inline IReg add_pairs(Pairs v) { return (IReg)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(1)); }
inline IReg magnitudes(IReg v) { return (IReg)_mm512_abs_epi8((__m512i)v); }
inline IReg with_signs(IReg x, IReg v) {
  const __m512i b = (__m512i)x;
  return (IReg)_mm512_mask_sub_epi8(b, _mm512_movepi8_mask((__m512i)v), _mm512_setzero_si512(), b);
}
#endif

// r[i] lane j becomes r[j] lane i.
inline void transpose(IReg (&rows)[16]) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = (__m512i)rows[i];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = (IReg)_mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    rows[4 + i] = (IReg)_mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    rows[8 + i] = (IReg)_mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    rows[12 + i] = (IReg)_mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

// Lane i of the result is the sum of the lanes of v[i].
constexpr int kSums = 16;
inline void sums_of(Reg (&v)[kSums], float* out) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(v[2 * i]), y = _mm512_castps_pd(v[2 * i + 1]);
    v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xDD));
  store(out, _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xDD)));
}

}  // namespace starling
