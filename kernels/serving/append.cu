// The append kernel on a GPU, for every dtype of a cache.
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include "runtime/device.hpp"
#include "serving/append.hpp"
#include "serving/append_kernel.hpp"
#include "serving/elements.hpp"

namespace cutlass_attn::serving {
namespace {

template <class Element, class Stored>
__global__ void __launch_bounds__(AppendKernel<Element, Stored>::kThreads,
                                  AppendKernel<Element, Stored>::kMinBlocksPerSm)
    append(__grid_constant__ AppendParams const params) {
  AppendKernel<Element, Stored>::run(params, int(blockIdx.x), int(threadIdx.x));
}

template <class Element>
Status launch(AppendParams params, RunOptions const& options) {
  auto* const function = is_token_format(params.problem.k_cache.dtype) ? &append<Element, Tokens>
                         : is_stored_as_fp8(params.problem)            ? &append<Element, E4M3>
                                                                       : &append<Element, Element>;
  return launch_on_device(reinterpret_cast<void const*>(function), &params,
                          AppendKernel<Element>::launch(params), options);
}

}  // namespace

Status append_on_device(AppendParams const& params, RunOptions const& options) {
  return by_element<cutlass::half_t, cutlass::bfloat16_t>(
      params.problem.k.dtype,
      [&](auto element) { return launch<decltype(element)>(params, options); });
}

}  // namespace cutlass_attn::serving
