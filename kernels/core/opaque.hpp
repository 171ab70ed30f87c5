// What a kernel tells the compiler about registers and branches. None of it changes a result; each
// use says what was measured with and without.
//
//   opaque(x)             x, of which the compiler knows nothing more: what follows from it is
//                         recomputed where it is needed, not kept in registers or local memory
//                         since it was computed elsewhere. And x itself is computed here, not later
//   opaque_index(x)       the same of a number that is not negative, which the compiler may use: a
//                         division by a power of two is a shift then, and four instructions else
//   forget_memory()       values read from memory before are read again
//   unpredicated_if()     an `if` that stays a branch
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

// `if (condition > 0) body();`, jumped over where the condition does not hold, and with nothing of
// the body computed before. The compiler turns an `if` into predicated instructions, even hundreds
// of them, which are then issued in any case. It does not do that to a loop.
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

}  // namespace cutlass_attn
