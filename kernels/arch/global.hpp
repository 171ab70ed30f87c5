// Global memory shared by the blocks of a grid: atomics and their memory orders.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct GlobalMemory {
  // atom.add, relaxed: returns the previous value.
  CUTE_DEVICE static int32_t atom_add(int32_t* counter, int32_t value) {
    return atomicAdd(counter, value);
  }

  // atom.add.acq_rel: returns the previous value. Writes of this thread before it, or of other
  // threads before a barrier with this thread, are visible to every thread that adds later, and to
  // threads that then pass a barrier with that thread.
  CUTE_DEVICE static int32_t atom_add_acq_rel(int32_t* counter, int32_t value) {
    int32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(value)
                 : "memory");
    return before;
  }

  // red.add.release: writes of this thread before it, or of other threads before a barrier with
  // this thread, are visible after wait_until() has read the new value.
  CUTE_DEVICE static void red_add_release(int32_t* counter, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
  }

  // fence.acq_rel and red.add: red_add_release() that also orders later reads. If ld_relaxed() has
  // read a value, the writes that other blocks released before that value are visible afterwards.
  CUTE_DEVICE static void red_add_acq_rel(int32_t* counter, int32_t value) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
  }

  // ld.relaxed: present value of a counter that other blocks increase. Orders nothing until
  // red_add_acq_rel().
  CUTE_DEVICE static int32_t ld_relaxed(int32_t const* counter) {
    int32_t now;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now;
  }

  // red.add of a warp's m16n8 accumulator to 128 floats, aligned to 16 bytes. Element i of a lane
  // is added at place_of(lane, i). Where the hardware has red.v4, one instruction adds four
  // elements.
  CUTE_DEVICE static constexpr int place_of(int lane, int i) {
    return kAddsFour ? lane * 4 + i : i * 32 + lane;
  }
  // `to`: address of element 0 of this lane.
  CUTE_DEVICE static void red_add(float* to, float const (&x)[4]) {
    if constexpr (kAddsFour) {
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
                   "f"(x[2]), "f"(x[3])
                   : "memory");
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) red_add(to + i * 32, x[i]);
    }
  }
  // Two neighbours, aligned to 8 bytes.
  CUTE_DEVICE static void red_add(float* to, float const (&x)[2]) {
    if constexpr (kAddsFour) {
      asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x[0]), "f"(x[1])
                   : "memory");
    } else {
      red_add(to, x[0]);
      red_add(to + 1, x[1]);
    }
  }
  CUTE_DEVICE static void red_add(float* to, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
  }

  // ld.acquire in a loop, until a counter that other blocks increase is at least `value`. Writes
  // that they released before are then visible.
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
  static int32_t atom_add(int32_t* counter, int32_t value) {
    return __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
  }
  static int32_t atom_add_acq_rel(int32_t* counter, int32_t value) {
    return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL);
  }
  static void red_add_release(int32_t* counter, int32_t value) {
    __atomic_fetch_add(counter, value, __ATOMIC_RELEASE);
  }
  // ThreadSanitizer does not model fences, so each of these two functions orders memory by itself.
  static void red_add_acq_rel(int32_t* counter, int32_t value) { red_add_release(counter, value); }
  static int32_t ld_relaxed(int32_t const* counter) {
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
  }
  static constexpr int place_of(int lane, int i) { return i * 32 + lane; }
  static void red_add(float* to, float const (&x)[4]) {
    for (int i = 0; i < 4; ++i) red_add(to + place_of(0, i), x[i]);
  }
  static void red_add(float* to, float const (&x)[2]) {
    red_add(to, x[0]);
    red_add(to + 1, x[1]);
  }
  static void red_add(float* to, float x) {
    float before, after;
    __atomic_load(to, &before, __ATOMIC_RELAXED);
    do {
      after = before + x;
    } while (
        !__atomic_compare_exchange(to, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  }
  // Blocks on other OS threads increase the counter. On a single OS thread, a block must not wait
  // for a later block.
  static void wait_until(int32_t const* counter, int32_t value) {
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < value) {
      simt::engine::wait_for_other_blocks();
    }
  }
};

#endif

}  // namespace cutlass_attn::arch
