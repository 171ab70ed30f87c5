// Binary floating-point formats of operands, written and read bit by bit, in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
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

// Distance between neighbouring numbers at x.
inline double ulp(Format f, double x) {
  int exponent = 1 - f.bias();
  if (x != 0) exponent = std::max(exponent, std::ilogb(x));
  return std::ldexp(1.0, exponent - f.significand_bits);
}

inline double round_to(Format f, double x) {
  return std::isfinite(x) ? std::nearbyint(x / ulp(f, x)) * ulp(f, x) : x;
}

inline uint32_t encode(Format f, double x) {
  uint32_t const sign = uint32_t(std::signbit(x)) << (f.significand_bits + f.exponent_bits);
  uint32_t const top = ((1u << f.exponent_bits) - 1) << f.significand_bits;
  if (std::isnan(x)) return sign | top | 1u << (f.significand_bits - 1);
  x = std::fabs(round_to(f, x));
  if (std::isinf(x)) return sign | top;
  // Counts in units of the last place. The carry out of the significand goes to the exponent.
  double const unit = ulp(f, x);
  uint32_t const exponent = uint32_t(std::ilogb(unit) + f.significand_bits - 1 + f.bias());
  return sign | ((exponent << f.significand_bits) + uint32_t(x / unit));
}

inline double decode(Format f, uint32_t bits) {
  uint32_t const fraction = bits & ((1u << f.significand_bits) - 1);
  int const exponent = int(bits >> f.significand_bits) & ((1 << f.exponent_bits) - 1);
  double x = std::ldexp(fraction, 1 - f.bias() - f.significand_bits);
  if (exponent == (1 << f.exponent_bits) - 1) {
    x = fraction ? kNaN : kInfinity;
  } else if (exponent > 0) {
    x = std::ldexp(fraction + std::ldexp(1.0, f.significand_bits),
                   exponent - f.bias() - f.significand_bits);
  }
  return bits >> (f.significand_bits + f.exponent_bits) & 1 ? -x : x;
}

// The nearest number of float8_e4m3fn.
inline double round_to_e4m3(double x) {
  int const exponent = std::max(x == 0 ? -6 : std::ilogb(x), -6);
  double const step = std::ldexp(1.0, exponent - 3);
  return std::min(std::max(std::nearbyint(x / step) * step, -448.0), 448.0);
}

}  // namespace attention_case
