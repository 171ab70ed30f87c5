// Shared memory by address, in bytes: kernels work out swizzled addresses themselves. Shared memory
// is aligned to 128 bytes, so that XOR with offsets below 128 is safe.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct SharedMemory {
  using SmemAddress = uint32_t;  // in the shared window

  CUTE_DEVICE static SmemAddress smem_address(void const* smem) {
    return cute::cast_smem_ptr_to_uint(smem);
  }

  // st.shared.v4
  CUTE_DEVICE static void store_shared(SmemAddress dst, uint32_t const (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3]));
  }
};

#else

struct SharedMemory {
  using SmemAddress = uintptr_t;

  static SmemAddress smem_address(void const* smem) { return reinterpret_cast<uintptr_t>(smem); }

  static void store_shared(SmemAddress dst, uint32_t const (&words)[4]) {
    simt::engine::store_shared(reinterpret_cast<void*>(dst), words);
  }
};

#endif

}  // namespace cutlass_attn::arch
