// What a GPU kernel is for a compiler: its entry, for nvcc and NVRTC alike.
//
//   static constexpr int kThreads, kMinBlocksPerSm;
//   template <class Score, class Arch>
//   static void run(AttnParams const&, TileScheduler const&, char* smem);
#pragma once

#include "core/scheduler.hpp"
#include "core/score.hpp"
#include "simt/device.hpp"

// A __global__ function `name`, a template or not, that runs a tile of Kernel with Score.
#define CA_KERNEL_ENTRY(name, Kernel, Score)                                            \
  __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinBlocksPerSm)          \
      name(__grid_constant__::cutlass_attn::AttnParams const params,                    \
           __grid_constant__::cutlass_attn::TileScheduler const scheduler) {            \
    extern __shared__ __align__(128) char smem[];                                       \
    Kernel::template run<Score, ::cutlass_attn::simt::Device>(params, scheduler, smem); \
  }
