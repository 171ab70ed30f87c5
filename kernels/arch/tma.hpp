// TMA: bulk copies of boxes of a tensor into shared memory, which one thread starts.
#pragma once

#include "arch/mbarrier.hpp"
#include "core/tensor_map.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Tma {
  // Copies the box that begins at the coordinates, to an address of 1024 bytes' alignment for tiles
  // that swizzle; its bytes, those outside the tensor too, count for the barrier's phase.
  CUTE_DEVICE static void tma_load(void* to, TensorMap const& map, Barrier* barrier, int x, int y,
                                   int z, int u, int w) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(cute::cast_smem_ptr_to_uint(to)),
        "l"(&map), "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(x), "r"(y), "r"(z), "r"(u), "r"(w)
        : "memory");
  }
  CUTE_DEVICE static void tma_prefetch(TensorMap const& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
  }
};

#else

struct Tma {
  static void tma_load(void* to, TensorMap const& map, Barrier* barrier, int x, int y, int z, int u,
                       int w) {
    simt::engine::tma_load(to, map, barrier, {x, y, z, u, w});
  }
  static void tma_prefetch(TensorMap const&) {}
};

#endif

}  // namespace cutlass_attn::arch
