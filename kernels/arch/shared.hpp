// Shared memory by byte address, because kernels compute swizzled addresses themselves. Shared
// memory is aligned to 128 bytes, so XOR with offsets below 128 is safe.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct SharedMemory {
  using SmemAddress = uint32_t;  // in the shared window

  CUTE_DEVICE static SmemAddress smem_address(void const* smem) { return shared_address(smem); }

  // st.shared.v4
  CUTE_DEVICE static void store_shared(SmemAddress dst, uint32_t const (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dst), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3]));
  }
  CUTE_DEVICE static void store_shared(SmemAddress dst, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(dst), "r"(word));
  }

  // ld.shared.v4, and .v2
  CUTE_DEVICE static void load_shared(SmemAddress src, uint32_t (&words)[4]) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(src));
  }
  CUTE_DEVICE static void load_shared(SmemAddress src, float (&pair)[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair[0]), "=f"(pair[1]) : "r"(src));
  }
  template <class T>  // int32_t or uint32_t
  CUTE_DEVICE static void load_shared(SmemAddress src, T (&pair)[2]) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pair[0]), "=r"(pair[1]) : "r"(src));
  }
};

#else

struct SharedMemory {
  using SmemAddress = uintptr_t;

  static SmemAddress smem_address(void const* smem) { return reinterpret_cast<uintptr_t>(smem); }

  static void store_shared(SmemAddress dst, uint32_t const (&words)[4]) {
    simt::engine::store_shared(reinterpret_cast<void*>(dst), words, 4);
  }
  static void store_shared(SmemAddress dst, uint32_t word) {
    simt::engine::store_shared(reinterpret_cast<void*>(dst), &word, 1);
  }
  static void load_shared(SmemAddress src, uint32_t (&words)[4]) {
    simt::engine::load_shared(reinterpret_cast<void const*>(src), words, 4);
  }
  template <class T>  // float, int32_t or uint32_t
  static void load_shared(SmemAddress src, T (&pair)[2]) {
    uint32_t words[2];
    simt::engine::load_shared(reinterpret_cast<void const*>(src), words, 2);
    std::memcpy(pair, words, sizeof pair);
  }
};

#endif

}  // namespace cutlass_attn::arch
