// Launch of a kernel type on the GPU, compiled with the library. The type supplies
//
//   static constexpr int kThreads, kMinBlocksPerSm, kSmemBytes;
//   static constexpr int kBlockM;        // rows of a block's tile
//   static constexpr bool kPacksHeads;   // which may be of several heads
//   template <class Score, class Arch>
//   static void run(AttnParams const&, TileScheduler const&, char* smem);
//
// and host_launch.hpp runs the same type on the CPU.
#pragma once

#include <cuda_runtime.h>

#include "runtime/image.hpp"
#include "simt/kernel_entry.hpp"

namespace cutlass_attn::simt {

template <class Kernel, class Score>
CA_KERNEL_ENTRY(kernel_entry, Kernel, Score)

// Runs `Kernel` with the first of the scores that takes the call. The device is current already.
template <class Kernel, class... Scores>
Status launch_device(AttnParams const& params, LaunchOptions const& options) {
  static KernelImage const image{facts_of<Kernel, Scores...>(),
                                 {reinterpret_cast<void const*>(&kernel_entry<Kernel, Scores>)...}};
  return launch(image, params, options);
}

}  // namespace cutlass_attn::simt
