// The machine of compute capability 9.0; its kernels are compiled for sm_90a.
#pragma once

#include "arch/cluster.hpp"
#include "arch/grid.hpp"
#include "arch/mbarrier.hpp"
#include "arch/sm80.hpp"
#include "arch/tma.hpp"
#include "arch/wgmma.hpp"

namespace cutlass_attn::arch {

struct Sm90 : Sm80, StMatrix, Cluster, Grid, Mbarrier, Tma, Wgmma {
  static constexpr int kSmemAlignment = 1024;  // period of the swizzle
  static constexpr bool kHasWgmma = true;
};

}  // namespace cutlass_attn::arch
