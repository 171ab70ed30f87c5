// One m16n8k16 block of a product of a warp.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

namespace cutlass_attn::sm80 {

// acc += A B, in the type of acc: `a` is the A operand, `b` the two words of the B operand.
template <class Arch, class Element, class Acc>
CUTE_DEVICE void multiply(uint32_t const (&a)[4], uint32_t const* b, Acc&& acc) {
  using namespace cute;
  Tensor tA = make_tensor(reinterpret_cast<Element const*>(a), Shape<_8>{});
  Tensor tB = make_tensor(reinterpret_cast<Element const*>(b), Shape<_4>{});
  using Accumulator = typename std::decay_t<Acc>::value_type;
  gemm(MMA_Atom<typename Arch::template Mma16816<Element, Accumulator>>{}, tA, tB, acc);
}

}  // namespace cutlass_attn::sm80
