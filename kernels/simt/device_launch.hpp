// Launch of a kernel type on the GPU. The type supplies
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

#include <atomic>

#include "core/score.hpp"
#include "cute/scheduler.hpp"
#include "cutlass_attn.hpp"
#include "runtime/device.hpp"
#include "simt/device.hpp"

namespace cutlass_attn::simt {

template <class Kernel, class Score>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kMinBlocksPerSm)
    kernel_entry(__grid_constant__ AttnParams const params,
                 __grid_constant__ TileScheduler const scheduler) {
  extern __shared__ __align__(128) char smem[];
  Kernel::template run<Score, Device>(params, scheduler, smem);
}

template <class Kernel, class Score>
Status launch_one(AttnParams const& params, LaunchOptions const& options) {
  auto* const entry = &kernel_entry<Kernel, Score>;
  if constexpr (Kernel::kSmemBytes > 48 * 1024) {
    // Beyond 48 KB a kernel must opt in, once per device.
    static std::atomic<uint64_t> opted_in{0};
    uint64_t const bit = uint64_t(1) << (options.device_index & 63);
    if (options.device_index >= 64 || !(opted_in.load(std::memory_order_relaxed) & bit)) {
      if (auto error = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            Kernel::kSmemBytes);
          error != cudaSuccess) {
        return cuda_status(error, "cudaFuncSetAttribute");
      }
      opted_in.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  TileScheduler const scheduler(params, Kernel::kBlockM, Kernel::kPacksHeads);
  int64_t const blocks = scheduler.blocks;
  if (blocks > INT32_MAX) {
    return Status::invalid("the call needs " + std::to_string(blocks) +
                           " thread blocks; a CUDA grid holds 2147483647: split the batch");
  }
  // Not <<<>>>: its outcome has to be asked of cudaGetLastError, which also knows errors of others.
  void* arguments[] = {const_cast<AttnParams*>(&params), const_cast<TileScheduler*>(&scheduler)};
  return cuda_status(cudaLaunchKernel(reinterpret_cast<void const*>(entry), dim3(unsigned(blocks)),
                                      Kernel::kThreads, arguments, Kernel::kSmemBytes,
                                      static_cast<cudaStream_t>(options.stream)),
                     "kernel launch");
}

// Runs `Kernel` with the first of the scores that takes the call; the last one takes any. The
// device is current already.
template <class Kernel, class Score, class... Others>
Status launch_device(AttnParams const& params, LaunchOptions const& options) {
  if constexpr (sizeof...(Others) > 0) {
    if (!Score::takes(params)) return launch_device<Kernel, Others...>(params, options);
  }
  return launch_one<Kernel, Score>(params, options);
}

}  // namespace cutlass_attn::simt
