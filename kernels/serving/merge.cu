// The merge kernel on a GPU, for every dtype of a result.
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include "runtime/device.hpp"
#include "serving/elements.hpp"
#include "serving/merge.hpp"
#include "serving/merge_kernel.hpp"

namespace cutlass_attn::serving {
namespace {

template <class Element>
__global__ void __launch_bounds__(MergeKernel<Element>::kThreads,
                                  MergeKernel<Element>::kMinBlocksPerSm)
    merge(__grid_constant__ MergeParams const params) {
  MergeKernel<Element>::run(params, int(blockIdx.x), int(threadIdx.x));
}

template <class Element>
Status launch(MergeParams params, RunOptions const& options) {
  return launch_on_device(reinterpret_cast<void const*>(&merge<Element>), &params,
                          MergeKernel<Element>::launch(params), options);
}

}  // namespace

Status merge_on_device(MergeParams const& params, RunOptions const& options) {
  return by_element<cutlass::half_t, cutlass::bfloat16_t>(
      params.problem.o.dtype,
      [&](auto element) { return launch<decltype(element)>(params, options); });
}

}  // namespace cutlass_attn::serving
