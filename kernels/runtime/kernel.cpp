// CUTLASS_ATTN_CUDA, 0 or 1, comes from CMake.
#include "runtime/kernel.hpp"

#include <cstring>
#include <string>

#if CUTLASS_ATTN_CUDA
#include <cuda_runtime_api.h>

#include "runtime/device.hpp"
#endif

namespace cutlass_attn {
namespace {

#if CUTLASS_ATTN_CUDA

Status launch_on_device(KernelUnit const& unit, int score, void* params, Launch const& launch,
                        RunOptions const& options) {
  void const* const function = unit.device_code[score];
  if (launch.smem_bytes > 48 * 1024) {
    // Beyond 48 KB a kernel must opt in, once per device.
    std::atomic<uint64_t>& opted_in = unit.opted_in[score];
    uint64_t const bit = uint64_t(1) << (options.device_index & 63);
    if (options.device_index >= 64 || !(opted_in.load(std::memory_order_relaxed) & bit)) {
      if (auto error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            unit.facts.smem_bytes);
          error != cudaSuccess) {
        return cuda_status(error, "cudaFuncSetAttribute");
      }
      opted_in.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  dim3 const grid(unsigned(launch.blocks)), block(unsigned(launch.threads));
  auto const stream = static_cast<cudaStream_t>(options.stream);
  if (launch.zeroed_bytes > 0) {
    auto const error =
        cudaMemsetAsync(options.workspace.data, 0, size_t(launch.zeroed_bytes), stream);
    if (error != cudaSuccess) return cuda_status(error, "cudaMemsetAsync");
  }
  void* arguments[] = {params};
  // Not <<<>>>: its outcome has to be asked of cudaGetLastError, which also knows errors of others.
  if (launch.cluster == 1) {
    return cuda_status(
        cudaLaunchKernel(function, grid, block, arguments, size_t(launch.smem_bytes), stream),
        "kernel launch");
  }
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = unsigned(launch.cluster);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = size_t(launch.smem_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cuda_status(cudaLaunchKernelExC(&config, function, arguments), "kernel launch");
}

#else

Status launch_on_device(KernelUnit const&, int, void*, Launch const&, RunOptions const&) {
  return Status::device_error("this build has no CUDA runtime");
}

#endif

}  // namespace

Status launch(KernelArguments const& kernel, KernelUnit const& unit, Problem const& problem,
              DeviceLimits const& limits, RunOptions const& options) {
  int score = 0;
  while (score < kernel.num_scores && !kernel.scores[score].takes(problem)) ++score;
  if (score == kernel.num_scores) return Status::no_kernel("no score functor takes this call");
  alignas(64) char params[KernelArguments::kMaxBytes];
  Workspace workspace = options.workspace;
  bool const is_on_device = unit.host_code[score] == nullptr;
#if CUTLASS_ATTN_CUDA
  if (is_on_device && workspace.bytes > 0 && workspace.zeros == nullptr) {
    workspace.zeros = zeros_of(options.device_index, options.stream);
    if (workspace.zeros != nullptr) workspace.zeros_bytes = kZerosBytes;
  }
#endif
  kernel.prepare(problem, workspace, limits, unit.facts, params);
  Launch const launch = kernel.launch(params, unit.facts);
  if (launch.blocks > INT32_MAX) {
    return Status::invalid("the call needs " + std::to_string(launch.blocks) +
                           " thread blocks; a grid holds 2147483647: split the batch");
  }
  if (!is_on_device) {
    if (launch.zeroed_bytes > 0) {
      std::memset(options.workspace.data, 0, size_t(launch.zeroed_bytes));
    }
    return unit.host_code[score](params, launch, options);
  }
  return launch_on_device(unit, score, params, launch, options);
}

}  // namespace cutlass_attn
