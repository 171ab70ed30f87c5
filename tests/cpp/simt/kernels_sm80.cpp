#include "simt/host_launch.hpp"
#include "simt/kernels_under_test.hpp"
#include "sm80/forward.hpp"

using namespace cutlass_attn;

std::vector<KernelUnderTest> kernels_under_test() {
  using Kernel = sm80::Forward<cutlass::half_t, 64, 64, 64, 4>;
  return {{"sm80/f16/d64", DType::kFloat16, &simt::launch_host<Kernel, IdentityScore>}};
}
