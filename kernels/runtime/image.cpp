// CUTLASS_ATTN_CUDA, 0 or 1, comes from CMake.
#include "runtime/image.hpp"

#if CUTLASS_ATTN_CUDA
#include <cuda_runtime_api.h>

#include "core/scheduler.hpp"
#include "runtime/device.hpp"

namespace cutlass_attn {

Status launch(KernelImage const& image, AttnParams const& params, LaunchOptions const& options) {
  KernelFacts const& facts = image.facts;
  int score = 0;
  while (score < facts.num_scores && !facts.takes[score](params)) ++score;
  if (score == facts.num_scores) return Status::no_kernel("no score functor takes this call");

  void const* const function = image.functions[score];
  if (facts.smem_bytes > 48 * 1024) {
    // Beyond 48 KB a kernel must opt in, once per device.
    std::atomic<uint64_t>& opted_in = image.opted_in[score];
    uint64_t const bit = uint64_t(1) << (options.device_index & 63);
    if (options.device_index >= 64 || !(opted_in.load(std::memory_order_relaxed) & bit)) {
      if (auto error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            facts.smem_bytes);
          error != cudaSuccess) {
        return cuda_status(error, "cudaFuncSetAttribute");
      }
      opted_in.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  TileScheduler const scheduler(params, facts.block_m, facts.packs_heads);
  int64_t const blocks = scheduler.blocks;
  if (blocks > INT32_MAX) {
    return Status::invalid("the call needs " + std::to_string(blocks) +
                           " thread blocks; a CUDA grid holds 2147483647: split the batch");
  }
  // Not <<<>>>: its outcome has to be asked of cudaGetLastError, which also knows errors of others.
  void* arguments[] = {const_cast<AttnParams*>(&params), const_cast<TileScheduler*>(&scheduler)};
  return cuda_status(
      cudaLaunchKernel(function, dim3(unsigned(blocks)), dim3(unsigned(facts.threads)), arguments,
                       size_t(facts.smem_bytes), static_cast<cudaStream_t>(options.stream)),
      "kernel launch");
}

}  // namespace cutlass_attn
#else
namespace cutlass_attn {

Status launch(KernelImage const&, AttnParams const&, LaunchOptions const&) {
  return Status::device_error("this build has no CUDA runtime");
}

}  // namespace cutlass_attn
#endif
