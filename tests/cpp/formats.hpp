// Binary floating-point formats of operands, written and read bit by bit, in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/problem.hpp"

namespace attention_case {

using cutlass_attn::DType;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Format {
  int bytes, significand_bits, exponent_bits;  // without the implicit bit

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};

inline Format format(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {2, 10, 5};
    case DType::kBFloat16:
      return {2, 7, 8};
    case DType::kFloat32:
      return {4, 23, 8};
    default:
      return {};
  }
}

// std::ldexp(1.0, exponent) and std::ilogb(x) by the bits of normal numbers. Calls took up to half
// of a test's time.
inline double power_of_2(int exponent) {
  uint64_t const bits = uint64_t(exponent + 1023) << 52;
  double x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline int exponent_of(double x) {  // -1023 for zero
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof(x));
  return int(bits >> 52 & 0x7ff) - 1023;
}

// Distance between neighbouring numbers at a finite x.
inline double ulp(Format f, double x) {
  return power_of_2(std::max(1 - f.bias(), exponent_of(x)) - f.significand_bits);
}

inline double round_to(Format f, double x) {
  double const unit = ulp(f, x);
  return std::isfinite(x) ? std::nearbyint(x / unit) * unit : x;
}

inline uint32_t encode(Format f, double x) {
  uint32_t const sign = uint32_t(std::signbit(x)) << (f.significand_bits + f.exponent_bits);
  uint32_t const top = ((1u << f.exponent_bits) - 1) << f.significand_bits;
  if (std::isnan(x)) return sign | top | 1u << (f.significand_bits - 1);
  x = std::fabs(round_to(f, x));
  if (std::isinf(x)) return sign | top;
  // Counts in units of the last place. The carry out of the significand goes to the exponent.
  double const unit = ulp(f, x);
  uint32_t const exponent = uint32_t(exponent_of(unit) + f.significand_bits - 1 + f.bias());
  return sign | ((exponent << f.significand_bits) + uint32_t(x / unit));
}

inline double decode(Format f, uint32_t bits) {
  uint32_t const fraction = bits & ((1u << f.significand_bits) - 1);
  int const exponent = int(bits >> f.significand_bits) & ((1 << f.exponent_bits) - 1);
  double x = fraction * power_of_2(1 - f.bias() - f.significand_bits);
  if (exponent == (1 << f.exponent_bits) - 1) {
    x = fraction ? kNaN : kInfinity;
  } else if (exponent > 0) {
    x = (fraction + power_of_2(f.significand_bits)) *
        power_of_2(exponent - f.bias() - f.significand_bits);
  }
  return bits >> (f.significand_bits + f.exponent_bits) & 1 ? -x : x;
}

// The nearest number of float8_e4m3fn.
inline double round_to_e4m3(double x) {
  double const step = power_of_2(std::max(exponent_of(x), -6) - 3);
  return std::min(448.0, std::max(-448.0, std::nearbyint(x / step) * step));
}

}  // namespace attention_case
