// Rows of GGUF's types of tensors -> codes, one a byte, with scales and minima in fp16. `gguf_blocks.py` has the same in torch, and
// says where the types are defined.
#include <cmath>

#include "parallel.h"
#include "simd.h"

namespace starling {
namespace {

typedef uint8_t* __restrict__ Codes;
typedef const uint8_t* __restrict__ Bytes;

inline void low_then_high(Bytes bytes, int n, Codes codes) {
  for (int i = 0; i < n; ++i) codes[i] = bytes[i] & 15;
  for (int i = 0; i < n; ++i) codes[n + i] = bytes[i] >> 4;
}
// Bit i of the four bytes is the fifth of code i.
inline void add_fifth_bits(Bytes four, Codes codes) {
  for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((four[i / 8] >> i % 8 & 1) << 4);
}
// 64 bytes, of which 32 hold 128 elements: each the four quarters of 2 bits.
inline void quarters(Bytes bytes, Codes codes) {
  for (int half = 0; half < 2; ++half)
    for (int part = 0; part < 4; ++part)
      for (int i = 0; i < 32; ++i) codes[half * 128 + part * 32 + i] = bytes[half * 32 + i] >> (part * 2) & 3;
}

// Where a row's scales and minima go.
struct Scales {
  uint16_t* scales;
  uint16_t* minima;

  void scale(float value) { *scales++ = float_to_half(value); }
  void minimum(float value) { *minima++ = float_to_half(value); }
  void copy_scale(Bytes half) { std::memcpy(scales++, half, 2); }
  void copy_minimum(Bytes half) { std::memcpy(minima++, half, 2); }
};

inline float half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return half_to_float(bits);
}

void read_q4_0(Bytes p, Codes codes, Scales& to) {
  to.copy_scale(p);
  low_then_high(p + 2, 16, codes);
}

void read_q4_1(Bytes p, Codes codes, Scales& to) {
  to.copy_scale(p);
  to.copy_minimum(p + 2);
  low_then_high(p + 4, 16, codes);
}

void read_q5_0(Bytes p, Codes codes, Scales& to) {
  to.copy_scale(p);
  low_then_high(p + 6, 16, codes);
  add_fifth_bits(p + 2, codes);
}

void read_q5_1(Bytes p, Codes codes, Scales& to) {
  to.copy_scale(p);
  to.copy_minimum(p + 2);
  low_then_high(p + 8, 16, codes);
  add_fifth_bits(p + 4, codes);
}

void read_q8_0(Bytes p, Codes codes, Scales& to) {
  to.copy_scale(p);
  for (int i = 0; i < 32; ++i) codes[i] = p[2 + i] ^ 128;
}

void read_mxfp4(Bytes p, Codes codes, Scales& to) {
  to.scale(std::ldexp(1.0f, p[0] - 128));
  low_then_high(p + 1, 16, codes);
}

void read_q2_k(Bytes p, Codes codes, Scales& to) {
  const float scale = half_at(p + 80), minimum = half_at(p + 82);
  for (int g = 0; g < 16; ++g) to.scale(scale * (p[g] & 15)), to.minimum(-minimum * (p[g] >> 4));
  quarters(p + 16, codes);
}

void read_q3_k(Bytes p, Codes codes, Scales& to) {
  const uint8_t* packed = p + 96;
  const float scale = half_at(p + 108);
  for (int g = 0; g < 16; ++g) {
    const int low = packed[g % 8] >> (g < 8 ? 0 : 4) & 15, top = packed[8 + g % 4] >> (g / 4 * 2) & 3;
    to.scale(scale * static_cast<float>((low | top << 4) - 32));
  }
  quarters(p + 32, codes);
  for (int bit = 0; bit < 8; ++bit)
    for (int i = 0; i < 32; ++i) codes[bit * 32 + i] |= static_cast<uint8_t>((p[i] >> bit & 1) << 2);
}

// Scales and minima of Q4_K and Q5_K: eight each, in 6 bits, of which the last four have two elsewhere.
void read_eight(Bytes p, Scales& to) {
  const float scale = half_at(p), minimum = half_at(p + 2);
  const uint8_t* packed = p + 4;
  for (int g = 0; g < 8; ++g) {
    const int s = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
    const int m = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
    to.scale(scale * static_cast<float>(s)), to.minimum(-minimum * static_cast<float>(m));
  }
}

void read_q4_k(Bytes p, Codes codes, Scales& to) {
  read_eight(p, to);
  for (int part = 0; part < 4; ++part) low_then_high(p + 16 + part * 32, 32, codes + part * 64);
}

void read_q5_k(Bytes p, Codes codes, Scales& to) {
  read_eight(p, to);
  for (int part = 0; part < 4; ++part) {
    Codes here = codes + part * 64;
    low_then_high(p + 48 + part * 32, 32, here);
    for (int i = 0; i < 64; ++i) here[i] |= static_cast<uint8_t>((p[16 + i % 32] >> (2 * part + i / 32) & 1) << 4);
  }
}

void read_q6_k(Bytes p, Codes codes, Scales& to) {
  const float scale = half_at(p + 208);
  for (int g = 0; g < 16; ++g) to.scale(scale * static_cast<float>(static_cast<int8_t>(p[192 + g])));
  for (int half = 0; half < 2; ++half) {
    Codes here = codes + half * 128;
    low_then_high(p + half * 64, 64, here);
    for (int i = 0; i < 128; ++i) here[i] |= static_cast<uint8_t>((p[128 + half * 32 + i % 32] >> (i / 32 * 2) & 3) << 4);
  }
}

void read_iq4_xs(Bytes p, Codes codes, Scales& to) {
  const float scale = half_at(p);
  for (int g = 0; g < 8; ++g) {
    const int low = p[4 + g / 2] >> (g % 2 * 4) & 15, high = p[2 + g / 4] >> (g % 4 * 2) & 3;
    to.scale(scale * static_cast<float>((low | high << 4) - 32));
    low_then_high(p + 8 + g * 16, 16, codes + g * 32);
  }
}

// By ggml's number of the type; null for those without codes.
using Read = void (*)(Bytes, Codes, Scales&);
Read reader_of(int type) {
  switch (type) {
    case 2: case 20: return read_q4_0;  // IQ4_NL differs by its table
    case 3: return read_q4_1;
    case 6: return read_q5_0;
    case 7: return read_q5_1;
    case 8: return read_q8_0;
    case 10: return read_q2_k;
    case 11: return read_q3_k;
    case 12: return read_q4_k;
    case 13: return read_q5_k;
    case 14: return read_q6_k;
    case 23: return read_iq4_xs;
    case 39: return read_mxfp4;
  }
  return nullptr;
}

}  // namespace
}  // namespace starling

using namespace starling;

extern "C" {

// raw [n] rows of `blocks` blocks of `size` bytes -> codes [n, k], scales [n, groups], minima the same or null. Returns 0 for a type
// that it does not know.
int64_t starling_read_gguf(const uint8_t* raw, int64_t n, int64_t blocks, int64_t size, int type, uint8_t* codes, int64_t k,
                           uint16_t* scales, uint16_t* minima, int64_t groups, int threads) {
  const Read read = reader_of(type);
  if (read == nullptr) return 0;
  parallel_for(n, threads_for(n, n * k * 4, threads), [&](int64_t i) {
    Scales to{scales + i * groups, minima ? minima + i * groups : nullptr};
    for (int64_t b = 0; b < blocks; ++b) read(raw + (i * blocks + b) * size, codes + i * k + b * (k / blocks), to);
  });
  return 1;
}

}  // extern "C"
