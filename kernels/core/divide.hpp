// Division by a divisor that is known at launch, as a multiplication and a shift. An integer
// division takes about 20 instructions on a GPU.
#pragma once

#include <cstdint>

#include "core/macros.hpp"

namespace cutlass_attn {

// floor(x / d) for 0 <= x < 2^31 and a divisor d > 0 (Granlund & Montgomery, "Division by invariant
// integers using multiplication"): with s = ceil(log2(d)), the multiplier m = ceil(2^(31+s) / d)
// fits 32 bits, and x * (m * d - 2^(31+s)) < 2^(31+s).
struct FastDivisor {
  uint32_t multiplier;
  uint32_t shift;

  FastDivisor() = default;
  explicit FastDivisor(int32_t divisor) : shift(31) {
    while ((int64_t(1) << (shift - 31)) < divisor) ++shift;
    multiplier = uint32_t(((uint64_t(1) << shift) + uint32_t(divisor) - 1) / uint32_t(divisor));
  }

  CA_HOST_DEVICE int32_t operator()(int32_t x) const {
    return int32_t(uint64_t(uint32_t(x)) * multiplier >> shift);
  }
};

// On the host: a divisor, or a number of groups, of a call that may be empty.
inline int32_t at_least_1(int64_t x) { return x < 1 ? 1 : int32_t(x); }

}  // namespace cutlass_attn
