// A warp's product of one m16n8k16 block.
#pragma once

#include "arch/mma.hpp"

namespace cutlass_attn {

// acc += A B, in the type of acc. `a` is the A operand, `b` the two words of the B operand.
template <class Arch, class Element, class Accumulator>
CUTE_DEVICE void multiply(uint32_t const (&a)[4], uint32_t const* b, Accumulator (&acc)[4]) {
  Arch::template mma_m16n8k16<Element>(acc, a, {b[0], b[1]});
}

}  // namespace cutlass_attn
