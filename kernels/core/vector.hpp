// The widest access of one instruction: 16 bytes.
#pragma once

#include <cstdint>

namespace cutlass_attn {

struct alignas(16) Vector16 {
  uint64_t low, high;
};

struct alignas(16) Quad {
  float values[4];
};

}  // namespace cutlass_attn
