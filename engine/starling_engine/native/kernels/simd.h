// AVX-512 helpers of the kernels: element types, loads and stores as fp32, exp, the 16x16 transpose.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(__AVX512BF16__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "the native kernels need AVX-512 with BF16; build.py must not compile them for this CPU"
#endif

namespace starling {

// Storage type only: arithmetic is done in fp32 or by vdpbf16ps.
struct bf16 {
  uint16_t bits;
};

// Storage type of cached keys and values: float8_e4m3fn (https://arxiv.org/abs/2209.05433), without infinities. NaN has all
// bits but the sign's.
struct fp8 {
  uint8_t bits;
};

// Elements of T in a cache line, which is also a register.
template <typename T>
constexpr int64_t kLine = 64 / sizeof(T);

inline __mmask16 first_lanes(int64_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << n) - 1);
}

inline __m512 widen(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

inline float to_float(bf16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline float to_float(float v) { return v; }

// 16 elements as fp32, rounded to nearest even on the way back. The masked forms read nothing (and write
// nothing) in the lanes left out.
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline __m512 load16(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline __m512 load16(const bf16* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
inline void store16(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void store16(bf16* p, __m512 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
inline void store16(float* p, __m512 v, __mmask16 m) { _mm512_mask_storeu_ps(p, m, v); }
inline void store16(bf16* p, __m512 v, __mmask16 m) { _mm256_mask_storeu_epi16(p, m, narrow(v)); }

// Rounds to nearest even, and clamps to the largest number. NaN stays NaN: a broken request must show.
inline __m128i narrow_to_fp8(__m512 v) {
  const __m512 held = _mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(448.0f)), _mm512_set1_ps(-448.0f));
  const __m512i bits = _mm512_castps_si512(held);
  const __m512i sign = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MIN)), size = _mm512_xor_si512(bits, sign);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_set1_epi32(0x7FFFF - (120 << 23)), odd);
  const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(size, up), 20);
  // Below 2^-6 numbers are 2^-9 apart, as in fp32 from 2^14 on.
  const __m512 base = _mm512_set1_ps(16384.0f);
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(size), base));
  const __mmask16 small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(121 << 23));
  const __m512i found = _mm512_mask_sub_epi32(normal, small, sum, _mm512_castps_si512(base));
  const __m512i with_sign = _mm512_or_si512(found, _mm512_srli_epi32(sign, 24));
  const __mmask16 unordered = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(with_sign, unordered, _mm512_set1_epi32(0x7F)));
}

inline void store16(fp8* p, __m512 v, __mmask16 m) { _mm_mask_storeu_epi8(p, m, narrow_to_fp8(v)); }

// Converts 32 elements at a time, by integers: bf16 has a bias of 127, fp8 one of 7. Subnormal numbers and NaN are looked up by
// their lowest five bits: they become the least numbers when 1 is added to the bits below the sign.
inline __m512i fp8_to_bf16(__m256i v) {
  const __m512i x = _mm512_cvtepi8_epi16(v);
  const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(static_cast<int16_t>(0x87F0)));
  const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
  const __m512i after = _mm512_add_epi16(_mm512_slli_epi16(x, 9), _mm512_set1_epi16(1 << 9));
  const __mmask32 special = _mm512_cmplt_epu16_mask(after, _mm512_set1_epi16(9 << 9));
  const __m128i subnormal = _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60);
  const __m512i table = _mm512_mask_mov_epi16(_mm512_zextsi128_si512(subnormal), 1u << 31, _mm512_set1_epi16(0x7FC0));
  const __m512i found = _mm512_mask_permutexvar_epi16(normal, special, x, table);
  return _mm512_or_si512(found, _mm512_and_si512(x, _mm512_set1_epi16(INT16_MIN)));
}

inline __m256i low_half(__m512i v) { return _mm512_castsi512_si256(v); }
inline void store32(bf16* p, __m512i v) { _mm512_storeu_si512(p, v); }
inline void store32(float* p, __m512i v) {
  store16(p, widen(low_half(v)));
  store16(p + 16, widen(_mm512_extracti64x4_epi64(v, 1)));
}

// n elements, a multiple of 16.
template <typename T>
inline void unpack(const fp8* in, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) store32(out + i, fp8_to_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
  if (i == n) return;
  const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
  store16(out + i, widen(low_half(fp8_to_bf16(_mm256_zextsi128_si256(last)))));
}

// The value of v after it is stored as T and read again.
template <typename T>
inline __m512 rounded(__m512 v);
template <>
inline __m512 rounded<float>(__m512 v) { return v; }
template <>
inline __m512 rounded<bf16>(__m512 v) { return widen(narrow(v)); }

// 2^x to about 2 ulp (Cephes' degree-5 polynomial on [-0.5, 0.5]); 0 below -126, so -inf works as a mask. NaN gives NaN.
inline __m512 exp2(__m512 x) {
  const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.339887440266574e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.618437357674640e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.550332471162809e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402264791363012e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931472028550421e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(alive, y, whole);
}

constexpr float kLog2E = 1.4426950408889634f;

inline __m512 exp(__m512 x) { return exp2(_mm512_mul_ps(x, _mm512_set1_ps(kLog2E))); }

inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// r[i] lane j becomes r[j] lane i. Rows of 32-bit lanes: fp32, or pairs of bf16 (the VNNI packing).
inline void transpose16x16(__m512i (&r)[16]) {
  __m512i t[16];
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
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

}  // namespace starling
