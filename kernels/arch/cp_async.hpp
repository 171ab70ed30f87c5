// cp.async: copies from global to shared memory that land at a wait.
#pragma once

#include "arch/shared.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct CpAsync {
  // 16 bytes past L1; without `predicate` zeros, and nothing is read.
  CUTE_DEVICE static void async_copy(SharedMemory::SmemAddress dst, void const* src,
                                     bool predicate) {
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

#else

struct CpAsync {
  static void async_copy(SharedMemory::SmemAddress dst, void const* src, bool predicate) {
    simt::engine::async_copy(reinterpret_cast<void*>(dst), src, predicate);
  }
  static void async_copy_commit() { simt::engine::async_copy_commit(); }

  template <int kPending>
  static void async_copy_wait() {
    simt::engine::async_copy_wait(kPending);
  }
};

#endif

}  // namespace cutlass_attn::arch
