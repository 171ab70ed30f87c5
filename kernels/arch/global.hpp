// Global memory that blocks of a grid share: atomics and their orders.
#pragma once

#include "arch/twins.hpp"

#if !defined(CA_DEVICE_TWIN)
#include <thread>
#endif

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct GlobalMemory {
  // atom.add, relaxed: returns the previous value.
  CUTE_DEVICE static int32_t fetch_add(int32_t* counter, int32_t value) {
    return atomicAdd(counter, value);
  }

  // atom.add.acq_rel: returns the previous value. Writes that this thread made before, or other
  // threads before a barrier with it, are visible to threads that add later, and to threads that
  // then pass a barrier with those.
  CUTE_DEVICE static int32_t fetch_add_acq_rel(int32_t* counter, int32_t value) {
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(value)
                 : "memory");
    return before;
  }

  // red.add.release: writes that this thread made before, or other threads before a barrier with
  // it, are visible after wait_until() has seen the new value.
  CUTE_DEVICE static void add_release(int32_t* counter, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
  }

  // red.add after a fence.acq_rel: add_release() that also orders what follows: writes that other
  // blocks released before a value that peek() has seen are visible afterwards.
  CUTE_DEVICE static void add_acq_rel(int32_t* counter, int32_t value) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
  }

  // ld.relaxed: the present value of a counter that other blocks increase. Orders nothing before
  // add_acq_rel().
  CUTE_DEVICE static int32_t peek(int32_t const* counter) {
    int32_t now;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now;
  }

  // red.add of a warp's m16n8 accumulator to 128 floats aligned to 16 bytes. Element i of this lane
  // is added at place_of(lane, i). One instruction adds four elements where the hardware has it.
  CUTE_DEVICE static constexpr int place_of(int lane, int i) {
    return kAddsFour ? lane * 4 + i : i * 32 + lane;
  }
  // `to`: the address of this lane's element 0.
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
  // To two neighbours, aligned to 8 bytes.
  CUTE_DEVICE static void add(float* to, float const (&x)[2]) {
    if constexpr (kAddsFour) {
      asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x[0]), "f"(x[1])
                   : "memory");
    } else {
      add(to, x[0]);
      add(to + 1, x[1]);
    }
  }
  CUTE_DEVICE static void add(float* to, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  }

  // ld.acquire in a loop: waits until a counter that other blocks increase is at least `value`.
  // Writes that they released before are then visible.
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
  // ThreadSanitizer does not model fences: here each of the two functions orders by itself.
  static void add_acq_rel(int32_t* counter, int32_t value) { add_release(counter, value); }
  static int32_t peek(int32_t const* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
  static constexpr int place_of(int lane, int i) { return i * 32 + lane; }
  static void add(float* to, float const (&x)[4]) {
    for (int i = 0; i < 4; ++i) add(to + place_of(0, i), x[i]);
  }
  static void add(float* to, float const (&x)[2]) {
    add(to, x[0]);
    add(to + 1, x[1]);
  }
  static void add(float* to, float x) {
    float before, after;
    __atomic_load(to, &before, __ATOMIC_RELAXED);
    do {
      after = before + x;
    } while (
        !__atomic_compare_exchange(to, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  }
  // Blocks on other OS threads increase the counter. On one OS thread, a kernel's blocks must not
  // wait for later blocks.
  static void wait_until(int32_t const* counter, int32_t value) {
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value) std::this_thread::yield();
  }
};

#endif

}  // namespace cutlass_attn::arch
