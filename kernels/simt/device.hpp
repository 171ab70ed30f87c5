// The GPU as a kernel body sees it: thread and block indices, barriers, shuffles, votes,
// asynchronous copies, conversions and tensor-core atoms, each a thin wrapper of one instruction.
//
// Kernel bodies take this class as their template parameter `Arch` and touch the hardware through
// nothing else; simt/host.hpp is the same interface on the CPU.
#pragma once

#include <cutlass/numeric_types.h>
#include <cstdint>
#include <cute/tensor.hpp>
#include <type_traits>

namespace cutlass_attn::simt {

namespace detail {
template <class Element, class Accumulator>
struct DeviceMma;
template <>
struct DeviceMma<cutlass::half_t, float> {
  using type = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct DeviceMma<cutlass::half_t, cutlass::half_t> {
  using type = cute::SM80_16x8x16_F16F16F16F16_TN;
};
template <>
struct DeviceMma<cutlass::bfloat16_t, float> {
  using type = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};
}  // namespace detail

// Defined in simt/device_wmma.hpp, which kernels that use it include.
template <int kM, int kN>
struct DeviceWmma;

struct Device {
  // mma.sync.m16n8k16 with accumulators in fp32, or in fp16 for operands in fp16.
  template <class Element, class Accumulator = float>
  using Mma = typename detail::DeviceMma<Element, Accumulator>::type;
  using LoadMatrix = cute::SM75_U32x4_LDSM_N;       // ldmatrix.x4
  using LoadMatrixTrans = cute::SM75_U16x8_LDSM_T;  // ldmatrix.x4.trans
  // nvcuda::wmma, kM x kN x 16, fp16 with fp32 accumulators: a warp's matrices as fragments whose
  // elements are in lanes that nobody may name. Fragments of one type have theirs in the same.
  template <int kM, int kN>
  using Wmma = DeviceWmma<kM, kN>;
  // cp.async of 16 bytes past L1; with(false) writes zeros and reads nothing.
  using AsyncCopy = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;

  CUTE_DEVICE static int thread() { return int(threadIdx.x); }
  CUTE_DEVICE static int block() { return int(blockIdx.x); }

  // `x`. What follows from it is computed again here, not kept in registers or local memory since
  // it was computed elsewhere. For sm_89 ptxas finds registers for it, and none once it is told so.
  CUTE_DEVICE static int recompute(int x) {
#if __CUDA_ARCH__ != 890
    asm volatile("" : "+r"(x));
#endif
    return x;
  }

  // `x`, computed here and not later, where it is needed.
  CUTE_DEVICE static float compute(float x) {
    asm volatile("" : "+f"(x));
    return x;
  }

  CUTE_DEVICE static void sync() { __syncthreads(); }

  // Barrier 1 to 15 among `threads` threads, whole warps, that all name the same count. Until the
  // next barrier of all the block's threads, a barrier serves the same warps only.
  CUTE_DEVICE static void sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  }

  // Among the lanes of a warp; it orders their accesses to memory.
  CUTE_DEVICE static void sync_warp() { __syncwarp(); }

  template <class T>
  CUTE_DEVICE static T shuffle_xor(T value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
  }

  // Whether `predicate` holds in any lane of the warp.
  CUTE_DEVICE static bool any(bool predicate) { return __any_sync(0xffffffffu, predicate); }

  // Two floats, rounded to nearest even, `low` in the low 16 bits.
  template <class Element>
  CUTE_DEVICE static uint32_t pack(float low, float high) {
    static_assert(std::is_same_v<Element, cutlass::half_t> ||
                  std::is_same_v<Element, cutlass::bfloat16_t>);
    uint32_t packed;
    // PTX names the high half first.
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
  }

  // What follows takes shared memory by its address in bytes, for kernels that work out swizzled
  // addresses themselves; the CuTe atoms above take tensors. Shared memory is aligned to 128
  // bytes, so that XOR with offsets below 128 is safe.
  using SmemAddress = uint32_t;  // in the shared window

  CUTE_DEVICE static SmemAddress smem_address(void const* smem) {
    return cute::cast_smem_ptr_to_uint(smem);
  }

  // ldmatrix.x4: lane l supplies the 16 bytes of row l % 8 of matrix l / 8; d[i] is of matrix i.
  CUTE_DEVICE static void load_matrix(SmemAddress row, uint32_t (&d)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row));
  }
  CUTE_DEVICE static void load_matrix_trans(SmemAddress row, uint32_t (&d)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row));
  }

  CUTE_DEVICE static void store_shared(SmemAddress dst, uint32_t const (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3]));
  }

  // 16 bytes past L1; without `predicate` zeros, and nothing is read.
  CUTE_DEVICE static void async_copy(SmemAddress dst, void const* src, bool predicate) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(predicate ? 16 : 0));
  }

  CUTE_DEVICE static void async_copy_commit() { cute::cp_async_fence(); }

  // Waits until at most `kPending` of this thread's committed groups are still in flight.
  template <int kPending>
  CUTE_DEVICE static void async_copy_wait() {
    cute::cp_async_wait<kPending>();
  }
};

}  // namespace cutlass_attn::simt
