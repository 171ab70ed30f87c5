// fp16 and bf16 on the CPU: exact conversion to fp32, and conversion back with rounding to nearest
// even. NaN stays NaN; infinities and subnormals keep their values. Branchless where that lets
// compilers vectorise a loop of conversions.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/e4m3.hpp"
#include "core/math.hpp"
#include "core/token_format.hpp"

namespace cutlass_attn::cpu {

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }  // double needs no conversion

inline float to_float(BFloat16 x) { return bfloat16_to_float(x.bits); }

inline float to_float(Float16 x) { return half_to_float(x.bits); }

inline float to_float(E4M3 x) { return float(x); }

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, E4M3& out) { out = to_e4m3(x); }
inline void from_float(double x, double& out) { out = x; }

inline void from_float(float x, BFloat16& out) {
  uint32_t const bits = bits_of(x);
  bool const is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  uint32_t const rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out.bits = uint16_t(is_nan ? (bits >> 16) | 0x40u : rounded);
}

inline void from_float(float x, Float16& out) {
  uint32_t const bits = bits_of(x);
  uint32_t const sign = (bits >> 16) & 0x8000u;
  uint32_t const magnitude = bits & 0x7fffffffu;
  uint32_t const nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // quiet
  // Below 2^-14. Between 1/2 and 1, fp32 has steps of 2^-24, like subnormal fp16, so the addition
  // rounds.
  uint32_t const subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t const normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t const value = magnitude > 0x7f800000u    ? nan
                         : magnitude >= 0x477ff000u ? 0x7c00u  // from 65520 up: infinity
                         : magnitude < 0x38800000u  ? subnormal
                                                    : normal;
  out.bits = uint16_t(sign | value);
}

}  // namespace cutlass_attn::cpu

namespace cutlass_attn {

template <class Half>
struct RoundedTo {
  static float of(float x) {
    Half y;
    cpu::from_float(x, y);
    return cpu::to_float(y);
  }
};
template <>
struct Rounded<cpu::Float16> : RoundedTo<cpu::Float16> {};
template <>
struct Rounded<cpu::BFloat16> : RoundedTo<cpu::BFloat16> {};

}  // namespace cutlass_attn

namespace cutlass_attn::cpu {

// All conversions as one type, for templates.
struct Convert {
  template <class Element>
  static float load(Element x) {
    return to_float(x);
  }
  template <class Element>
  static void store(float x, Element& to) {
    from_float(x, to);
  }
};

}  // namespace cutlass_attn::cpu
