// What one instruction moves between registers and memory at most.
#pragma once

#include <cstdint>

namespace cutlass_attn {

struct alignas(16) Vector16 {
  uint64_t low, high;
};

}  // namespace cutlass_attn
