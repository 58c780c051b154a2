// Conversions of float8_e4m3fn, in which a cache may hold keys and values.
#pragma once

#include "simd.h"

namespace starling {

// The bits of fp32 for codes of fp8, by integers: fp32 has a bias of 127, fp8 one of 7. Subnormal numbers are 2^-9 apart.
inline IReg float_bits(IReg codes) {
  const IReg size = codes & 0x7F, normal = (size << 20) + (120 << 23);
  const IReg small = (IReg)(__builtin_convertvector(size, Reg) * splat(0x1p-9f));
  const IReg number = size < 8 ? small : size == 0x7F ? IReg{} + 0x7FC00000 : normal;
  return number | (codes & 0x80) << 24;
}

#ifdef __AVX512BW__
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
  return _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(with_sign, static_cast<__mmask16>(unordered(v)), _mm512_set1_epi32(0x7F)));
}

inline void store16(fp8* p, Floats v, Lanes lanes) { _mm_mask_storeu_epi8(p, lanes, narrow_to_fp8(v.part[0])); }

// Converts 32 elements at a time, by integers: bf16 has a bias of 127, fp8 one of 7. Subnormal numbers and NaN are seldom there. They
// are looked up by their lowest five bits, and become the least numbers when 1 is added to the bits below the sign.
inline __m512i fp8_to_bf16(__m256i v) {
  const __m512i x = _mm512_cvtepi8_epi16(v);
  const __m512i moved = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(static_cast<int16_t>(0x87F0)));
  const __m512i normal = _mm512_add_epi16(moved, _mm512_set1_epi16(120 << 7));
  const __m256i after = _mm256_and_si256(_mm256_add_epi8(v, _mm256_set1_epi8(1)), _mm256_set1_epi8(0x7F));
  const __mmask32 special = _mm256_cmple_epu8_mask(after, _mm256_set1_epi8(8));
  if (__builtin_expect(special == 0, 1)) return normal;
  const __m128i subnormal = _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60);
  const __m512i table = _mm512_mask_mov_epi16(_mm512_zextsi128_si512(subnormal), 1u << 31, _mm512_set1_epi16(0x7FC0));
  const __m512i found = _mm512_mask_permutexvar_epi16(normal, special, x, table);
  return _mm512_or_si512(found, _mm512_and_si512(x, _mm512_set1_epi16(INT16_MIN)));
}

inline IReg bf16_pairs(const fp8* p) { return (IReg)fp8_to_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline __m256i low_half(__m512i v) { return _mm512_castsi512_si256(v); }
inline __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
inline void store32(bf16* p, __m512i v) { _mm512_storeu_si512(p, v); }
inline void store32(float* p, __m512i v) {
  store(p, widen(low_half(v)));
  store(p + 16, widen(_mm512_extracti64x4_epi64(v, 1)));
}

// n elements, a multiple of 16.
template <typename T>
inline void unpack(const fp8* in, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) store32(out + i, fp8_to_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
  if (i == n) return;
  const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
  store16(out + i, Floats{{widen(low_half(fp8_to_bf16(_mm256_zextsi128_si256(last))))}});
}
#else
// Rounds to nearest even, and clamps to the largest number. NaN stays NaN: a broken request must show.
inline fp8 to_fp8(float v) {
  if (v != v) return {0x7F};
  uint32_t bits;
  const float held = std::max(std::min(v, 448.0f), -448.0f);
  std::memcpy(&bits, &held, sizeof bits);
  const uint32_t sign = bits >> 31 << 7, size = bits & 0x7FFFFFFFu;
  uint32_t found = (size + 0x7FFFFu - (120u << 23) + (size >> 20 & 1)) >> 20;
  if (size < 121u << 23) {
    // Below 2^-6 numbers are 2^-9 apart, as in fp32 from 2^14 on.
    float sum;
    std::memcpy(&sum, &size, sizeof sum);
    sum += 16384.0f;
    std::memcpy(&found, &sum, sizeof found);
    found -= (127u + 14u) << 23;
  }
  return {static_cast<uint8_t>(sign | found)};
}

// A register of elements as pairs of bf16, which hold them exactly.
#ifdef __AVX2__
// As for AVX-512; subnormal numbers and NaN are seldom there.
inline __m256i fp8_to_bf16(__m128i v) {
  const __m256i x = _mm256_cvtepi8_epi16(v);
  const __m256i moved = _mm256_and_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi16(static_cast<int16_t>(0x87F0)));
  const __m256i normal = _mm256_add_epi16(moved, _mm256_set1_epi16(120 << 7));
  const __m256i after = _mm256_add_epi16(_mm256_slli_epi16(x, 9), _mm256_set1_epi16(1 << 9));
  const __m256i special = _mm256_cmpeq_epi16(_mm256_min_epu16(after, _mm256_set1_epi16(8 << 9)), after);
  if (__builtin_expect(_mm256_testz_si256(special, special), 1)) return normal;
  const __m128i subnormal = _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60);
  const __m256i number = _mm256_and_si256(x, _mm256_set1_epi16(7));
  const __m256i bytes = _mm256_add_epi16(_mm256_mullo_epi16(number, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
  const __m256i small = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(subnormal), bytes);
  const __m256i nan = _mm256_cmpeq_epi16(after, _mm256_setzero_si256());
  const __m256i found = _mm256_blendv_epi8(small, _mm256_set1_epi16(0x7FC0), nan);
  return _mm256_or_si256(_mm256_blendv_epi8(normal, found, special), _mm256_and_si256(x, _mm256_set1_epi16(INT16_MIN)));
}
inline IReg bf16_pairs(const fp8* p) { return (IReg)fp8_to_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store_pairs(bf16* p, IReg v) { store_words(p, v); }
inline void store_pairs(float* p, IReg v) {
  alignas(32) bf16 halves[16];
  store_words(halves, v);
  store16(p, load16(halves));
}

// n is a multiple of 16.
template <typename T>
inline void unpack(const fp8* in, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += 16) store_pairs(out + i, bf16_pairs(in + i));
}
#else
inline IReg bf16_pairs(const fp8* p) {
  const IReg both = (IReg)load(reinterpret_cast<const bf16*>(p));
  return (IReg)((UReg)float_bits(both >> 16 & 0xFF) >> 16) | (float_bits((IReg)((UReg)both >> 24)) & ~0xFFFF);
}

// n is a multiple of 16.
template <typename T>
inline void unpack(const fp8* in, int64_t n, T* out) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, (Reg)float_bits(load_bytes(in + i)));
}
#endif

inline void store16(fp8* p, Floats v, Lanes lanes) {
  alignas(64) float all[16];
  store16(all, v);
  for (int i = 0; i < 16; ++i)
    if (lanes >> i & 1) p[i] = to_fp8(all[i]);
}
#endif

}  // namespace starling
