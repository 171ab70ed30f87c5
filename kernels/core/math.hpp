// Transcendental functions of attention, with one definition for GPU and CPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/macros.hpp"

namespace cutlass_attn {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInf = __builtin_huge_valf();

CA_HOST_DEVICE uint32_t float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
CA_HOST_DEVICE float bits_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// Bits of a bfloat16 (then of a float16) to float.
CA_HOST_DEVICE float bfloat16_to_float(uint16_t bits) {
  uint32_t const wide = uint32_t(bits) << 16;
  float x;
  __builtin_memcpy(&x, &wide, sizeof x);
  return x;
}
CA_HOST_DEVICE float half_to_float(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  // Exponent and mantissa are in place, but the exponent's bias is 112 too small. A multiplication
  // corrects the bias and normalises subnormal numbers. Infinities and NaNs get the largest
  // exponent. The code has no branch, so that compilers vectorise loops over it.
  uint32_t const magnitude = uint32_t(bits & 0x7fffu) << 13;
  float x;
  __builtin_memcpy(&x, &magnitude, sizeof x);
  x *= 0x1p112f;
  uint32_t wide;
  __builtin_memcpy(&wide, &x, sizeof wide);
  wide |= uint32_t(bits & 0x8000u) << 16 | (magnitude >= 0x7c00u << 13 ? 0x7f800000u : 0u);
  __builtin_memcpy(&x, &wide, sizeof x);
  return x;
#endif
}

// 2^x to 2 ulp; results under 2^-125 may become 0. On the GPU one MUFU.EX2.
CA_HOST_DEVICE float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  // No calls, so that compilers vectorise loops over it. 2^x = 2^n * 2^f with integer n and |f| <=
  // 1/2. 2^f is a minimax polynomial (relative error 2e-9). It is computed twice as large, so that
  // the scale 2^(n-1) is finite wherever the result is.
  float const bounded = x > 129.0f ? 129.0f : x;  // NaN stays NaN
  constexpr float kRounder = 12582912.0f;         // 1.5 * 2^23: adding it leaves n in the low bits
  float const rounded = bounded + kRounder;
  float const f = bounded - (rounded - kRounder);
  float y = 3.0706724e-4f;
  y = y * f + 2.679775e-3f;
  y = y * f + 1.9236874e-2f;
  y = y * f + 1.11006648e-1f;
  y = y * f + 4.8045296e-1f;
  y = y * f + 1.3862944f;
  y = y * f + 2.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &rounded, sizeof bits);
  bits = (bits + 126u) << 23;  // 2^(n-1)
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return x < -125.0f ? 0.0f : y * scale;
#endif
}

// 1 / x to 1 ulp. log2(x) to 2 ulp, near x = 1 to 2^-22. On the GPU one MUFU each.
CA_HOST_DEVICE float fast_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}
CA_HOST_DEVICE float fast_log2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return log2f(x);
#endif
}

// tanh(x) to 2e-7 absolute: 1 - 2 / (1 + e^2x). An exponential that overflows gives 1.
CA_HOST_DEVICE float fast_tanh(float x) {
  return 1.0f - 2.0f * fast_reciprocal(1.0f + fast_exp2(2.0f * kLog2e * x));
}

}  // namespace cutlass_attn
