// The machine that a kernel body sees: thin wrappers, one header per family of instructions. A
// kernel calls them through its template parameter Arch. The only exception is a family that few
// kernels need (arch/wmma.hpp).
//
// Each family has two twins with one name and one interface. The device twin is the instruction.
// The host twin emulates what the instruction guarantees, on the engine of simt/engine.hpp, and
// reports uses that rely on more. The compiler of a translation unit selects the twin: nvcc and
// NVRTC get the device twin, a C++ compiler gets the host twin. sm80.hpp and sm90.hpp combine the
// families of an architecture.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA_DEVICE_TWIN
#endif

#include <cutlass/numeric_types.h>
#include <cstdint>
#include <cute/config.hpp>
#include <type_traits>

#if !defined(CA_DEVICE_TWIN)
#include <cstring>

#include "simt/engine.hpp"
#endif

namespace cutlass_attn::arch {

template <class Element>
inline constexpr bool is_16_bit =
    std::is_same_v<Element, cutlass::half_t> || std::is_same_v<Element, cutlass::bfloat16_t>;

#if defined(CA_DEVICE_TWIN)
// Address in the shared window, from a generic address.
CUTE_DEVICE uint32_t shared_address(void const* smem) {
  return uint32_t(__cvta_generic_to_shared(smem));
}
// mapa.shared::cluster: the corresponding address in block `rank` of the cluster.
CUTE_DEVICE uint32_t cluster_address(void const* smem, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(smem)), "r"(rank));
  return there;
}
#endif

}  // namespace cutlass_attn::arch
