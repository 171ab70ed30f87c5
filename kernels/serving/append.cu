// The append kernel on a GPU, for every dtype of a cache.
#include <cuda_runtime_api.h>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include "runtime/device.hpp"
#include "serving/append.hpp"
#include "serving/append_kernel.hpp"

namespace cutlass_attn::serving {
namespace {

template <class Element>
__global__ void __launch_bounds__(AppendKernel<Element>::kThreads,
                                  AppendKernel<Element>::kMinBlocksPerSm)
    append(__grid_constant__ AppendParams const params) {
  AppendKernel<Element>::run(params, int(blockIdx.x), int(threadIdx.x));
}

template <class Element>
Status launch(AppendParams const& params, cudaStream_t stream) {
  Launch const launch = AppendKernel<Element>::launch(params);
  void* arguments[] = {const_cast<AppendParams*>(&params)};
  return cuda_status(cudaLaunchKernel(reinterpret_cast<void const*>(&append<Element>),
                                      dim3(unsigned(launch.blocks)), dim3(unsigned(launch.threads)),
                                      arguments, 0, stream),
                     "kernel launch");
}

}  // namespace

Status append_on_device(AppendParams const& params, RunOptions const& options) {
  auto const stream = static_cast<cudaStream_t>(options.stream);
  switch (params.problem.k.dtype) {
    case DType::kFloat16:
      return launch<cutlass::half_t>(params, stream);
    case DType::kBFloat16:
      return launch<cutlass::bfloat16_t>(params, stream);
    default:
      return launch<float>(params, stream);
  }
}

}  // namespace cutlass_attn::serving
