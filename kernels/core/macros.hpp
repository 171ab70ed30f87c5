// Function qualifiers for code that is compiled both for the GPU and for the CPU.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CA_HOST_DEVICE inline
#endif

// Unrolls a loop completely, so that the arrays it indexes stay in registers.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA_UNROLL _Pragma("unroll")
#else
#define CA_UNROLL
#endif

// Unrolls a loop of unknown length, so that the loads of eight iterations are in flight.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA_UNROLL_8 _Pragma("unroll 8")
#else
#define CA_UNROLL_8
#endif
