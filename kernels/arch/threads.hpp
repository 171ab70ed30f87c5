// Threads of a block: indices, barriers, shuffles, votes, and conversions of pairs.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Threads {
  CUTE_DEVICE static int thread() { return int(threadIdx.x); }
  CUTE_DEVICE static int block() { return int(blockIdx.x); }

  // Returns x, which must be equal in all lanes of the warp. The compiler then knows that it is
  // uniform.
  CUTE_DEVICE static int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

  CUTE_DEVICE static void sync() { __syncthreads(); }

  // bar.sync: barrier 1 to 15 of `threads` threads, in whole warps, which all pass an equal count.
  // Until the next barrier of the whole block, a barrier number serves one set of warps.
  CUTE_DEVICE static void sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  }

  // bar.arrive: sync() without waiting. Writes of this thread are visible to the threads that wait.
  // A thread arrives once per completion of the barrier.
  CUTE_DEVICE static void arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
  }

  // nanosleep: waits for about so long.
  CUTE_DEVICE static void sleep(uint32_t ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

  // __syncwarp: barrier of the lanes of a warp; it orders their accesses to memory.
  CUTE_DEVICE static void sync_warp() { __syncwarp(); }

  template <class T>
  CUTE_DEVICE static T shuffle_xor(T value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
  }

  // shfl.idx: the value of the lane `source`, which may differ between lanes.
  template <class T>
  CUTE_DEVICE static T shuffle(T value, int source) {
    return __shfl_sync(0xffffffffu, value, source);
  }

  // vote.any: whether `predicate` holds in any lane of the warp.
  CUTE_DEVICE static bool any(bool predicate) { return __any_sync(0xffffffffu, predicate); }

  // cvt.rn: two floats, rounded to nearest even, `low` in the low 16 bits.
  template <class Element>
  CUTE_DEVICE static uint32_t pack(float low, float high) {
    static_assert(is_16_bit<Element>);
    uint32_t packed;
    // PTX names the high half first.
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
  }

  // Low bytes of four words; x0 becomes the lowest byte.
  CUTE_DEVICE static uint32_t pack_bytes(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    return __byte_perm(__byte_perm(x0, x1, 0x0040), __byte_perm(x2, x3, 0x0040), 0x5410);
  }
};

#else

struct Threads {
  static int thread() { return simt::engine::thread(); }
  static int block() { return simt::engine::block(); }

  static int uniform(int x) { return x; }

  static void sync() { simt::engine::sync(); }
  static void sync(int barrier, int threads) { simt::engine::sync(barrier, threads); }
  static void arrive(int barrier, int threads) { simt::engine::arrive(barrier, threads); }
  static void sleep(uint32_t) {}
  static void sync_warp() { simt::engine::sync_warp(); }

  template <class T>
  static T shuffle_xor(T value, int lane_mask) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = simt::engine::shuffle_xor(bits, lane_mask);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }

  template <class T>
  static T shuffle(T value, int source) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = simt::engine::shuffle(bits, source);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }

  static bool any(bool predicate) { return simt::engine::any(predicate); }

  template <class Element>
  static uint32_t pack(float low, float high) {
    static_assert(is_16_bit<Element>);
    return uint32_t(Element(low).raw()) | uint32_t(Element(high).raw()) << 16;
  }

  static uint32_t pack_bytes(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
    return (x0 & 0xff) | (x1 & 0xff) << 8 | (x2 & 0xff) << 16 | x3 << 24;
  }
};

#endif

}  // namespace cutlass_attn::arch
