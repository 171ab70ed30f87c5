// mbarrier: barriers in shared memory that count arrivals of threads and bytes of bulk copies.
//
// A barrier goes through phases 0, 1, 2 ... A phase ends when all its arrivals and all expected
// bytes are in. wait(parity) returns once the phase of that parity, 0 or 1, has ended; before the
// first phase, the phase of parity 1 counts as ended.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

using Barrier = uint64_t;

#if defined(CA_DEVICE_TWIN)

struct Mbarrier {
  CUTE_DEVICE static void mbarrier_init(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals));
  }
  // fence.mbarrier_init: makes initialised barriers visible to TMA. Other threads also need a
  // barrier of the block.
  CUTE_DEVICE static void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  CUTE_DEVICE static void mbarrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
  }
  // mbarrier.arrive.shared::cluster: arrives at this barrier of block `rank` of the cluster, after
  // this thread's reads. It publishes no writes to other blocks: release.cluster would, by a
  // MEMBAR.ALL.GPU (NVRTC 13.0).
  CUTE_DEVICE static void mbarrier_arrive_cluster(Barrier* barrier, int rank) {
    asm volatile(
        "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
        : "memory");
  }
  // mbarrier.arrive.expect_tx: arrives, and adds `bytes` to the transaction count of the phase.
  CUTE_DEVICE static void mbarrier_arrive_expect_tx(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
                 "r"(bytes)
                 : "memory");
  }
  CUTE_DEVICE static void mbarrier_wait(Barrier* barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}\n" ::"r"(address(barrier)),
        "r"(parity)
        : "memory");
  }
  // mbarrier.test_wait: whether mbarrier_wait() would return at once.
  CUTE_DEVICE static bool mbarrier_has_ended(Barrier* barrier, int parity) {
    uint32_t has_ended;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(has_ended)
        : "r"(address(barrier)), "r"(parity)
        : "memory");
    return has_ended != 0;
  }

 private:
  CUTE_DEVICE static uint32_t address(Barrier* barrier) { return shared_address(barrier); }
};

#else

struct Mbarrier {
  static void mbarrier_init(Barrier* barrier, int arrivals) {
    simt::engine::mbarrier_init(barrier, arrivals);
  }
  static void fence_mbarrier_init() { simt::engine::fence_mbarrier_init(); }
  static void mbarrier_arrive(Barrier* barrier) { simt::engine::mbarrier_arrive(barrier, 0); }
  static void mbarrier_arrive_cluster(Barrier* barrier, int rank) {
    simt::engine::mbarrier_arrive_cluster(barrier, rank);
  }
  static void mbarrier_arrive_expect_tx(Barrier* barrier, int bytes) {
    simt::engine::mbarrier_arrive(barrier, bytes);
  }
  static void mbarrier_wait(Barrier* barrier, int parity) {
    simt::engine::mbarrier_wait(barrier, parity);
  }
  static bool mbarrier_has_ended(Barrier* barrier, int parity) {
    return simt::engine::mbarrier_has_ended(barrier, parity);
  }
};

#endif

}  // namespace cutlass_attn::arch
