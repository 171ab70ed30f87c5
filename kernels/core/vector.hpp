// The widest access of one instruction: 16 bytes.
#pragma once

#include <cstdint>

namespace cutlass_attn {

struct alignas(16) Vector16 {
  uint64_t low, high;
};

}  // namespace cutlass_attn
