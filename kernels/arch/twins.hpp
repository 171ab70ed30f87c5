// The machine as a kernel body sees it: one header for each family of instructions, thin wrappers
// that a kernel calls through its template parameter Arch, and through nothing else but a family
// that few kernels want (arch/wmma.hpp).
//
// Each family has two forms of one name and one interface. The device twin is the instruction. The
// host twin does what the instruction promises on the engine of simt/engine.hpp, and reports what
// it does not promise. Which one a translation unit gets depends on its compiler: nvcc and NVRTC
// get the device's, a C++ compiler the host's. sm80.hpp puts the families of an architecture
// together.
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
// Address in the shared window, of a generic one.
CUTE_DEVICE uint32_t shared_address(void const* smem) {
  return uint32_t(__cvta_generic_to_shared(smem));
}
#endif

}  // namespace cutlass_attn::arch
