// Global memory that blocks of one grid share.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct GlobalMemory {
  // What was there before; the addition is atomic, and orders nothing by itself.
  CUTE_DEVICE static int32_t fetch_add(int32_t* counter, int32_t value) {
    return atomicAdd(counter, value);
  }

  // What this thread wrote before is there for whoever sees what it writes after; and the other way
  // round for what it reads.
  CUTE_DEVICE static void fence() { __threadfence(); }
};

#else

struct GlobalMemory {
  static int32_t fetch_add(int32_t* counter, int32_t value) {
    return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL);
  }
  static void fence() {}  // fetch_add orders what comes before and after
};

#endif

}  // namespace cutlass_attn::arch
