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

// `if (condition > 0) body();` that is a branch, and from which nothing is computed before. An `if`
// becomes predicates, even of hundreds of instructions, and then they are issued in any case; a
// loop does not.
template <class Body>
CA_HOST_DEVICE void branch(int condition, Body&& body) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(condition));
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
