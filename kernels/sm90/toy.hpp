// The textbook's attention, between two instructions that only sm_90a has: shows that a row of that
// arch is compiled by nvcc, by NVRTC and for the CPU.
#pragma once

#include "arch/wgmma.hpp"
#include "scalar/minimal.hpp"

namespace cutlass_attn::sm90 {

template <class Element>
struct Toy : scalar::Minimal<Element> {
  template <class Score, class Arch>
  CUTE_DEVICE static void run(ForwardParams const& params, char* smem) {
    arch::Wgmma::fence();
    arch::Wgmma::commit();
    arch::Wgmma::wait<0>();
    scalar::Minimal<Element>::template run<Score, Arch>(params, smem);
  }
};

}  // namespace cutlass_attn::sm90
