// Global memory that blocks of one grid share.
#pragma once

#include "arch/twins.hpp"

#if !defined(CA_DEVICE_TWIN)
#include <thread>
#endif

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct GlobalMemory {
  // What was there before; the addition is atomic, and orders nothing by itself.
  CUTE_DEVICE static int32_t fetch_add(int32_t* counter, int32_t value) {
    return atomicAdd(counter, value);
  }

  // The same, which also orders: what this thread wrote before, or others did before a barrier of
  // theirs, is there for whoever adds later, and for those who meet that thread at a barrier then.
  CUTE_DEVICE static int32_t fetch_add_acq_rel(int32_t* counter, int32_t value) {
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(value)
                 : "memory");
    return before;
  }

  // An addition for wait_until(): what this thread wrote before, or others did before a barrier of
  // theirs, is there then.
  CUTE_DEVICE static void add_release(int32_t* counter, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
  }

  // The same, which also orders what follows: what others did before a value that peek() has seen
  // is there then.
  CUTE_DEVICE static void add_acq_rel(int32_t* counter, int32_t value) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
  }

  // What a counter that other blocks raise is now. Orders nothing before add_acq_rel().
  CUTE_DEVICE static int32_t peek(int32_t const* counter) {
    int32_t now;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now;
  }

  // An m16n8 accumulator of the whole warp joins 128 floats, which begin on 16 bytes: element i of
  // this lane the one at place_of(lane, i). One instruction where there is one for four.
  CUTE_DEVICE static constexpr int place_of(int lane, int i) {
    return kAddsFour ? lane * 4 + i : i * 32 + lane;
  }
  // `to`: of element 0 of this lane.
  CUTE_DEVICE static void add(float* to, float const (&x)[4]) {
    if constexpr (kAddsFour) {
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
                   "f"(x[2]), "f"(x[3])
                   : "memory");
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) add(to + i * 32, x[i]);
    }
  }
  CUTE_DEVICE static void add(float* to, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  }

  // Waits until a counter that other blocks raise is `value` or more. What they did before is there
  // then.
  CUTE_DEVICE static void wait_until(int32_t const* counter, int32_t value) {
    int32_t now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (now < value);
  }

 private:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kAddsFour = true;
#else
  static constexpr bool kAddsFour = false;
#endif
};

#else

struct GlobalMemory {
  static int32_t fetch_add(int32_t* counter, int32_t value) {
    return __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
  }
  static int32_t fetch_add_acq_rel(int32_t* counter, int32_t value) {
    return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL);
  }
  static void add_release(int32_t* counter, int32_t value) {
    __atomic_fetch_add(counter, value, __ATOMIC_RELEASE);
  }
  // ThreadSanitizer knows no fences: here each of the two orders by itself.
  static void add_acq_rel(int32_t* counter, int32_t value) { add_release(counter, value); }
  static int32_t peek(int32_t const* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
  static constexpr int place_of(int lane, int i) { return i * 32 + lane; }
  static void add(float* to, float const (&x)[4]) {
    for (int i = 0; i < 4; ++i) add(to + place_of(0, i), x[i]);
  }
  static void add(float* to, float x) {
    float before, after;
    __atomic_load(to, &before, __ATOMIC_RELAXED);
    do {
      after = before + x;
    } while (
        !__atomic_compare_exchange(to, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  }
  // Blocks on other threads of the OS raise it: on one thread, a kernel's blocks must not wait for
  // later ones.
  static void wait_until(int32_t const* counter, int32_t value) {
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value) std::this_thread::yield();
  }
};

#endif

}  // namespace cutlass_attn::arch
