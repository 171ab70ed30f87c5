// Function qualifiers for code that is compiled both for the GPU and for the CPU.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CA_HOST_DEVICE inline
#endif

// Before a loop whose counter has to be a constant in every round: what it indexes is in registers.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA_UNROLL _Pragma("unroll")
#else
#define CA_UNROLL
#endif

namespace cutlass_attn {

// `if (condition) body();` that is a branch. An `if` becomes predicates, even of hundreds of
// instructions, and then they are issued in any case; a loop does not.
template <class Body>
CA_HOST_DEVICE void branch(bool condition, Body&& body) {
  int rounds = condition;
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(rounds));
#endif
  for (; rounds > 0; --rounds) body();
}

}  // namespace cutlass_attn
