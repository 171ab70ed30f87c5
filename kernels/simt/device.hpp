// The GPU as a kernel body sees it: thread and block indices, barriers, shuffles, asynchronous
// copies and tensor-core atoms, each a thin wrapper of one intrinsic.
//
// Kernel bodies take this class as their template parameter `Arch` and touch the hardware through
// nothing else; simt/host.hpp is the same interface on the CPU.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

namespace cutlass_attn::simt {

namespace detail {
template <class Element>
struct DeviceMma;
template <>
struct DeviceMma<cutlass::half_t> {
  using type = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct DeviceMma<cutlass::bfloat16_t> {
  using type = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};
}  // namespace detail

struct Device {
  // mma.sync.m16n8k16 with fp32 accumulators.
  template <class Element>
  using Mma = typename detail::DeviceMma<Element>::type;
  using LoadMatrix = cute::SM75_U32x4_LDSM_N;       // ldmatrix.x4
  using LoadMatrixTrans = cute::SM75_U16x8_LDSM_T;  // ldmatrix.x4.trans
  // cp.async of 16 bytes past L1; with(false) writes zeros and reads nothing.
  using AsyncCopy = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;

  CUTE_DEVICE static int thread() { return int(threadIdx.x); }
  CUTE_DEVICE static int block() { return int(blockIdx.x); }

  CUTE_DEVICE static void sync() { __syncthreads(); }

  template <class T>
  CUTE_DEVICE static T shuffle_xor(T value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
  }

  CUTE_DEVICE static void async_copy_commit() { cute::cp_async_fence(); }

  // Waits until at most `kPending` of this thread's committed groups are still in flight.
  template <int kPending>
  CUTE_DEVICE static void async_copy_wait() {
    cute::cp_async_wait<kPending>();
  }
};

}  // namespace cutlass_attn::simt
