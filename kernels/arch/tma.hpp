// TMA: bulk copies of a box of a tensor into shared memory, or from there to another block of the
// cluster. Issued by one thread.
#pragma once

#include "arch/mbarrier.hpp"
#include "core/tensor_map.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Tma {
  // elect.sync: true in one lane of a warp; all lanes call it. Under this condition ptxas knows
  // that one lane issues a copy. Under any other condition it makes each copy a loop over lanes.
  CUTE_DEVICE static bool elect() {
    uint32_t is_elected;
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "elect.sync _|elected, 0xffffffff;\n"
        "selp.b32 %0, 1, 0, elected;\n"
        "}\n"
        : "=r"(is_elected));
    return is_elected != 0;
  }
  // cp.async.bulk.tensor: copies the box that begins at the coordinates. For swizzled tiles the
  // shared address is aligned to 1024 bytes. All bytes of the box count for the barrier's phase,
  // also those outside the tensor.
  CUTE_DEVICE static void tma_load(void* to, TensorMap const& map, Barrier* barrier, int x, int y,
                                   int z, int u, int w) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(w)
        : "memory");
  }
  // The same, into the same place of each block of the cluster whose bit is set in `blocks`. Each
  // block's barrier counts the bytes that it receives. One read of L2 serves all of them.
  CUTE_DEVICE static void tma_load_multicast(void* to, TensorMap const& map, Barrier* barrier,
                                             uint16_t blocks, int x, int y, int z, int u, int w) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "h"(blocks), "r"(x), "r"(y), "r"(z), "r"(u), "r"(w)
        : "memory");
  }
  // cp.async.bulk: copies `bytes`, a multiple of 16, from this block's shared memory to the same
  // place in block `rank` of the cluster, where they count for the barrier. TMA reads what threads
  // stored before their fence_proxy_async(). wgmma there needs no fence to read what it writes.
  CUTE_DEVICE static void cp_async_bulk(void const* from, int bytes, int rank, Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];" ::"r"(cluster_address(from, rank)),
        "r"(shared_address(from)), "r"(bytes), "r"(cluster_address(barrier, rank))
        : "memory");
  }
  CUTE_DEVICE static void prefetch_tensormap(TensorMap const& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
  }
};

#else

struct Tma {
  static bool elect() {
    bool const all_came = simt::engine::any(true);
    return all_came && simt::engine::thread() % 32 == 0;
  }
  static void tma_load(void* to, TensorMap const& map, Barrier* barrier, int x, int y, int z, int u,
                       int w) {
    simt::engine::tma_load(to, map, barrier, 0, {x, y, z, u, w});
  }
  static void tma_load_multicast(void* to, TensorMap const& map, Barrier* barrier, uint16_t blocks,
                                 int x, int y, int z, int u, int w) {
    simt::engine::tma_load(to, map, barrier, blocks, {x, y, z, u, w});
  }
  static void cp_async_bulk(void const* from, int bytes, int rank, Barrier* barrier) {
    simt::engine::cp_async_bulk(from, bytes, rank, barrier);
  }
  static void prefetch_tensormap(TensorMap const&) {}
};

#endif

}  // namespace cutlass_attn::arch
