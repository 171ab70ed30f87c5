// float8_e4m3fn: a sign, 4 bits of exponent with a bias of 7, 3 bits of mantissa. It has no
// infinities; all ones is NaN, and the largest number is 448 (OCP 8-bit floating point, 2023).
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"

namespace cutlass_attn {

struct E4M3 {
  uint8_t bits;

  CA_HOST_DEVICE uint8_t raw() const { return bits; }
  CA_HOST_DEVICE explicit operator float() const;
};

CA_HOST_DEVICE E4M3::operator float() const {
  // Puts exponent and mantissa where fp16 has them. The bias of fp16 is 8 more, even for subnormal
  // numbers. NaN becomes an fp16 NaN.
  uint32_t const magnitude = bits & 0x7fu;
  uint32_t const half =
      uint32_t(bits & 0x80u) << 8 | (magnitude == 0x7fu ? 0x7e00u : magnitude << 7);
  return half_to_float(uint16_t(half)) * 256.0f;
}

// Converts two e4m3 in the high bytes of 16 bits each to fp16 that are 256 times too small:
// exponent and mantissa move by one bit, behind a zero. Only NaN carries into that bit, which makes
// it an fp16 NaN.
CA_HOST_DEVICE uint32_t small_halves_of(uint32_t two_e4m3) {
  uint32_t const halves = (two_e4m3 & 0x80008000u) | (two_e4m3 >> 1 & 0x3f803f80u);
  return halves | ((halves + 0x00800080u) & 0x40004000u);
}

// Rounds to nearest even. Beyond 448 the result is 448; NaN stays NaN.
CA_HOST_DEVICE E4M3 to_e4m3(float x) {
  auto const bits_of = [](float y) {
    uint32_t bits;
    __builtin_memcpy(&bits, &y, sizeof bits);
    return bits;
  };
  uint32_t const sign = bits_of(x) >> 24 & 0x80u;
  uint32_t const magnitude = bits_of(x) & 0x7fffffffu;
  float const size = fabsf(x);
  // Below 2^-6. Between 2^14 and 2^15, fp32 has steps of 2^-9, like subnormal e4m3, so the addition
  // rounds.
  uint32_t const subnormal = bits_of(size + 16384.0f) - bits_of(16384.0f);
  uint32_t const normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  uint32_t const value = magnitude > 0x7f800000u ? 0x7fu
                         : size >= 448.0f        ? 0x7eu
                         : size < 0.015625f      ? subnormal
                                                 : normal;
  return {uint8_t(sign | value)};
}

}  // namespace cutlass_attn
