// Thread block clusters: blocks that run at the same time and read each other's shared memory.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Cluster {
  // Barrier among all threads of the cluster. It orders their accesses to shared memory.
  CUTE_DEVICE static void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
  }
  // Cluster barrier without memory ordering: after it, a block whose shared memory others read may
  // exit.
  CUTE_DEVICE static void cluster_leave() {
    asm volatile(
        "barrier.cluster.arrive.relaxed.aligned;\n"
        "barrier.cluster.wait.aligned;" ::
            : "memory");
  }

  // mapa: the address in block `rank` of the cluster that corresponds to `address` in this block.
  template <class T>
  CUTE_DEVICE static T const* mapa(T const* address, int rank) {
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(address), "r"(rank));
    return reinterpret_cast<T const*>(there);
  }
};

#else

struct Cluster {
  static void cluster_sync() { simt::engine::cluster_sync(); }
  static void cluster_leave() { simt::engine::cluster_sync(); }
  template <class T>
  static T const* mapa(T const* address, int rank) {
    return static_cast<T const*>(simt::engine::mapa(address, rank));
  }
};

#endif

}  // namespace cutlass_attn::arch
