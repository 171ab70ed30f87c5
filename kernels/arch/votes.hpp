// Votes of a warp: one bit per lane.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Votes {
  // Bit i is the predicate of lane i. All lanes call it.
  CUTE_DEVICE static uint32_t ballot(bool predicate) {
    return __ballot_sync(0xffffffffu, predicate);
  }
};

#else

struct Votes {
  static uint32_t ballot(bool predicate) {
    uint64_t bits = uint64_t(predicate) << simt::engine::thread() % 32;
    for (int lanes = 1; lanes < 32; lanes *= 2) bits |= simt::engine::shuffle_xor(bits, lanes);
    return uint32_t(bits);
  }
};

#endif

}  // namespace cutlass_attn::arch
