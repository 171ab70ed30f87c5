// cp.async: asynchronous copies from global to shared memory.
#pragma once

#include "arch/shared.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct CpAsync {
  // cp.async of 16 bytes, bypassing L1. Without `predicate` it reads nothing and writes zeros.
  CUTE_DEVICE static void cp_async(SharedMemory::SmemAddress dst, void const* src, bool predicate) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(predicate ? 16 : 0));
  }

  // cp.async with the L2 policy evict_first: these lines evict each other and leave the rest of L2
  // alone. cp_async() has no policy: evict_normal took 146 us, no policy 137 us (H200,
  // sm80/decode, 64x2048 keys of 8 heads).
  CUTE_DEVICE static void cp_async_evict_first(SharedMemory::SmemAddress dst, void const* src,
                                               bool predicate) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst),
        "l"(src), "r"(predicate ? 16 : 0), "l"(policy));
  }

  CUTE_DEVICE static void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }

  // cp.async.wait_group: waits until at most `kPending` of this thread's committed groups are in
  // flight.
  template <int kPending>
  CUTE_DEVICE static void cp_async_wait_group() {
    if constexpr (kPending == 0) {
      asm volatile("cp.async.wait_all;");
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
    }
  }
};

#else

struct CpAsync {
  static void cp_async(SharedMemory::SmemAddress dst, void const* src, bool predicate) {
    simt::engine::cp_async(reinterpret_cast<void*>(dst), src, predicate);
  }
  static void cp_async_evict_first(SharedMemory::SmemAddress dst, void const* src, bool predicate) {
    cp_async(dst, src, predicate);
  }
  static void cp_async_commit_group() { simt::engine::cp_async_commit_group(); }

  template <int kPending>
  static void cp_async_wait_group() {
    simt::engine::cp_async_wait_group(kPending);
  }
};

#endif

}  // namespace cutlass_attn::arch
