// What tensors hold, and the lanes of a register that are meant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace starling {

// Storage type only: arithmetic is done in fp32, or on pairs of bf16 with sums in fp32.
struct bf16 {
  uint16_t bits;
};

// Storage type of cached keys and values: float8_e4m3fn (https://arxiv.org/abs/2209.05433), without infinities. NaN has all
// bits but the sign's.
struct fp8 {
  uint8_t bits;
};

inline float to_float(bf16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline float to_float(float v) { return v; }

// Elements of T in a cache line, which is the unit of packed matrices.
template <typename T>
constexpr int64_t kLine = 64 / sizeof(T);

// A bit for each of 16 lanes.
typedef uint16_t Lanes;
constexpr Lanes kAllLanes = 0xFFFF;

inline Lanes first_lanes(int64_t n) { return n >= 16 ? kAllLanes : static_cast<Lanes>((1u << n) - 1); }

}  // namespace starling
