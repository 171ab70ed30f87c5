// Hints to the compiler about registers and branches. None changes a result. Each use says what was
// measured with and without the hint.
//
//   opaque(x)             x through an empty asm. The compiler knows nothing about the result, so
//                         it recomputes expressions of it at each use, instead of keeping them in
//                         registers or local memory. x itself is computed at this point, not later
//   opaque_index(x)       opaque for a number that the compiler may assume to be non-negative:
//                         division by a power of two is then a shift instead of four instructions
//   forget_memory()       values read from memory before are loaded again when needed
//   unpredicated_if()     an `if` that stays a branch
//   branch_if()           the same where ptxas sees through unpredicated_if()
#pragma once

#include <cstdint>

#include "core/macros.hpp"

namespace cutlass_attn {

template <class T>  // int, unsigned, float or an address
CA_HOST_DEVICE T opaque(T x) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else if constexpr (T(0.5f) == T(0)) {
    asm volatile("" : "+r"(x));
  } else {
    asm volatile("" : "+f"(x));
  }
#endif
  return x;
}

CA_HOST_DEVICE int opaque_index(int x) {
  x = opaque(x);
#if defined(__CUDA_ARCH__)
  __builtin_assume(x >= 0);
#endif
  return x;
}

CA_HOST_DEVICE void forget_memory() {
#if defined(__CUDA_ARCH__)
  asm volatile("" ::: "memory");
#endif
}

// `if (condition > 0) body();` as a real branch: if the condition does not hold, the body is jumped
// over, and no part of it is hoisted. The compiler turns an `if` into predicated instructions, even
// hundreds of them, which are then always issued. It does not do that to a loop.
template <class Body>
CA_HOST_DEVICE void unpredicated_if(int condition, Body&& body) {
#if defined(__CUDA_ARCH__)
  condition = opaque(condition);
  while (condition > 0) {
    condition = 0;
    asm volatile("" : "+r"(condition) : : "memory");
    body();
  }
#else
  if (condition > 0) body();
#endif
}

// unpredicated_if() where ptxas would see through it: the loop ends by a number that it does not
// know. It also keeps instructions before and after it apart.
template <class Body>
CA_HOST_DEVICE void branch_if(int condition, Body&& body) {
#if defined(__CUDA_ARCH__)
  condition = opaque(condition);
  while (condition > 0) {
    uint32_t active;
    asm volatile("activemask.b32 %0;" : "=r"(active) : : "memory");
    condition = active == 0;
    body();
  }
#else
  if (condition > 0) body();
#endif
}

}  // namespace cutlass_attn
