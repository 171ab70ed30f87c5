// CMake defines CUTLASS_ATTN_CUDA as 0 or 1.
#include "runtime/kernel.hpp"

#include <cstring>
#include <string>

#if CUTLASS_ATTN_CUDA
#include <cuda_runtime_api.h>
#endif

#include "runtime/device.hpp"
#include "runtime/kept.hpp"

namespace cutlass_attn {
namespace {

#if CUTLASS_ATTN_CUDA

// Loads the code of a score and of its pre- and post-launch, once per device, and opts in to shared
// memory beyond 48 KB. CUDA would load the code lazily, at the first launch, which would invalidate
// the capture of another thread.
Status load_code(KernelUnit const& unit, int score, int device_index) {
  std::atomic<uint64_t>& loaded = unit.loaded[score];
  uint64_t const bit = uint64_t(1) << (device_index & 63);
  if (device_index < 64 && loaded.load(std::memory_order_relaxed) & bit) return {};
  RelaxedCapture const relaxed;
  if (!relaxed.status().ok()) return relaxed.status();
  for (void const* code :
       {unit.device_code[score], unit.device_pre_post[0], unit.device_pre_post[1]}) {
    cudaFuncAttributes attributes;
    if (code == nullptr) continue;
    auto const error = cudaFuncGetAttributes(&attributes, code);
    if (error != cudaSuccess) return cuda_status(error, "cudaFuncGetAttributes");
  }
  if (unit.facts.smem_bytes > 48 * 1024) {
    auto const error =
        cudaFuncSetAttribute(unit.device_code[score], cudaFuncAttributeMaxDynamicSharedMemorySize,
                             unit.facts.smem_bytes);
    if (error != cudaSuccess) return cuda_status(error, "cudaFuncSetAttribute");
  }
  loaded.fetch_or(bit, std::memory_order_relaxed);
  return {};
}

#else

Status load_code(KernelUnit const&, int, int) { return {}; }

#endif

}  // namespace

#if CUTLASS_ATTN_CUDA

Status launch_on_device(void const* function, void* params, Launch const& launch,
                        RunOptions const& options) {
  dim3 const grid(unsigned(launch.blocks)), block(unsigned(launch.threads));
  auto const stream = static_cast<cudaStream_t>(options.stream);
  if (launch.zeroed_bytes > 0) {
    auto const error =
        cudaMemsetAsync(options.workspace.data, 0, size_t(launch.zeroed_bytes), stream);
    if (error != cudaSuccess) return cuda_status(error, "cudaMemsetAsync");
  }
  void* arguments[] = {params};
  // Not <<<>>>: its result comes from cudaGetLastError, which also reports errors of other calls.
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.attrs = attributes;
  if (launch.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(launch.cluster), 1, 1};
  }
  if (launch.overlaps) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.numAttrs == 0) {
    return cuda_status(
        cudaLaunchKernel(function, grid, block, arguments, size_t(launch.smem_bytes), stream),
        "kernel launch");
  }
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = size_t(launch.smem_bytes);
  config.stream = stream;
  return cuda_status(cudaLaunchKernelExC(&config, function, arguments), "kernel launch");
}

#else

Status launch_on_device(void const*, void*, Launch const&, RunOptions const&) {
  return Status::device_error("this build has no CUDA runtime");
}

#endif

Status launch(KernelArguments const& kernel, KernelUnit const& unit, Problem const& problem,
              DeviceLimits const& limits, RunOptions const& options, Part part) {
  int const score = score_of(kernel, problem);
  if (score == kernel.num_scores) return Status::no_kernel("no score functor takes this call");
  UserScoreMod const* const mod = options.score_mod;
  if (problem.logits.has_score_mod != (mod != nullptr) ||
      (mod != nullptr && (mod->bytes < 0 || mod->bytes > UserScoreMod::kMaxBytes))) {
    return Status::invalid(
        "score_mod: the options must name one exactly if the problem has one, of at most " +
        std::to_string(UserScoreMod::kMaxBytes) + " bytes");
  }
  alignas(64) char params[KernelArguments::kMaxBytes + UserScoreMod::kMaxBytes];
  Workspace workspace = options.workspace;
  bool const is_on_device = unit.host_code[score] == nullptr;
#if CUTLASS_ATTN_CUDA
  if (is_on_device && workspace.bytes > 0 && workspace.zeros == nullptr) {
    Workspace const kept = kept_workspace(options.device_index, options.stream, 0);
    workspace.zeros = kept.zeros;
    workspace.zeros_bytes = kept.zeros_bytes;
  }
#endif
  kernel.prepare(problem, workspace, limits, unit.facts, params);
  if (mod != nullptr) std::memcpy(params + kernel.params_bytes, mod->operands, size_t(mod->bytes));
  auto const run = [&](Launch launch, void const* device_code,
                       KernelUnit::HostCode host_code) -> Status {
    launch.overlaps = unit.facts.overlaps != 0;
    if (launch.failure != nullptr) return Status::device_error(launch.failure);
    if (launch.blocks > INT32_MAX) {
      return Status::invalid("the call needs " + std::to_string(launch.blocks) +
                             " thread blocks; a grid holds 2147483647: split the batch");
    }
    if (is_on_device) return launch_on_device(device_code, params, launch, options);
    if (launch.zeroed_bytes > 0) {
      std::memset(options.workspace.data, 0, size_t(launch.zeroed_bytes));
    }
    return host_code(params, launch, options);
  };
  auto const run_pre_post = [&](int i) -> Status {
    if (!kernel.has_pre_post()) return {};
    Launch const launch = kernel.launch_pre_post[i](params, unit.facts);
    if (launch.blocks == 0) return {};
    return run(launch, unit.device_pre_post[i], unit.host_pre_post[i]);
  };
  Launch const main = kernel.launch(params, unit.facts);
  Status status;
  if (is_on_device) status = load_code(unit, score, options.device_index);
  if (status.ok() && part != Part::kRest) status = run_pre_post(0);
  if (!status.ok() || part == Part::kBefore) return status;
  // A kernel without pre- and post-launch is called only if it has something to compute.
  if (status.ok() && (main.blocks > 0 || !kernel.has_pre_post())) {
    status = run(main, unit.device_code[score], unit.host_code[score]);
  }
  if (status.ok()) status = run_pre_post(1);
  return status;
}

}  // namespace cutlass_attn
