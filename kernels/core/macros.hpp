// Function qualifiers for code that is compiled both for the GPU and for the CPU.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CA_HOST_DEVICE inline
#endif
