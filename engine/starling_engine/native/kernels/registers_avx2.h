// Registers of AVX2 with FMA: 8 floats.
#pragma once

#include <immintrin.h>

#include "elements.h"

namespace starling {

constexpr int kLanes = 8;
typedef __m256 Reg;
typedef int32_t IReg __attribute__((vector_size(32), may_alias));

inline Reg splat(float x) { return _mm256_set1_ps(x); }
inline Reg load(const float* p) { return _mm256_loadu_ps(p); }
inline Reg load(const bf16* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Reg load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline IReg load_bytes(const void* p) {
  return (IReg)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
inline void store(float* p, Reg v) { _mm256_storeu_ps(p, v); }
inline void stream(void* p, IReg v) { _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v); }
inline void end_of_stream() { _mm_sfence(); }

inline Reg multiply_add(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
inline Reg highest(Reg a, Reg b) { return _mm256_max_ps(a, b); }
inline Reg lowest(Reg a, Reg b) { return _mm256_min_ps(a, b); }
inline Reg nearest_whole(Reg v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum_of(Reg v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float highest_of(Reg v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline uint32_t above(Reg a, Reg b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline uint32_t at_least(Reg a, Reg b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
inline uint32_t unordered(Reg v) { return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)); }
inline Reg choose(uint32_t lanes, Reg yes, Reg no) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bit), bit);
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(chosen));
}

inline void store_high_halves(bf16* p, IReg v) {
  const __m256i halves = _mm256_srli_epi32((__m256i)v, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// As for AVX-512: 16 bytes in each half.
inline IReg broadcast_bytes(const uint8_t* p) {
  return (IReg)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline IReg look_up_bytes(IReg table, IReg codes) { return (IReg)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes); }

// As for AVX-512 without VNNI.
#define STARLING_BYTE_PAIRS
typedef int16_t Pairs __attribute__((vector_size(32), may_alias));
inline Pairs multiply_bytes(IReg codes, IReg x) { return (Pairs)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x); }
inline IReg add_pairs(Pairs v) { return (IReg)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi16(1)); }
inline IReg magnitudes(IReg v) { return (IReg)_mm256_abs_epi8((__m256i)v); }
inline IReg with_signs(IReg x, IReg v) { return (IReg)_mm256_sign_epi8((__m256i)x, (__m256i)v); }

// r[i] lane j becomes r[j] lane i.
inline void transpose(IReg (&rows)[8]) {
  __m256i r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = (__m256i)rows[i];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = (IReg)_mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
    rows[4 + i] = (IReg)_mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
  }
}

// out[i] is the sum of the lanes of v[i].
constexpr int kSums = 8;
inline void sums_of(Reg (&v)[kSums], float* out) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  store(out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
}

}  // namespace starling
