// wgmma, of a warpgroup: 128 threads together. Compute capability 9.0a alone has it.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Wgmma {
  // Orders accesses to registers before the wgmma that follow.
  CUTE_DEVICE static void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  // The wgmma before are a group; waits until at most kPending groups are not complete.
  CUTE_DEVICE static void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  template <int kPending>
  CUTE_DEVICE static void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  }
};

#else

struct Wgmma {
  static void fence() { simt::engine::sync_warp(); }
  static void commit() { simt::engine::sync_warp(); }
  template <int kPending>
  static void wait() {
    simt::engine::sync_warp();
  }
};

#endif

}  // namespace cutlass_attn::arch
