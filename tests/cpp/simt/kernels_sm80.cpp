#include "simt/host_launch.hpp"
#include "simt/kernels_under_test.hpp"
#include "sm80/forward.hpp"

using namespace cutlass_attn;

// One for each schedule of the main loop, and one whose warps work in groups.
std::vector<KernelUnderTest> kernels_under_test() {
  using Pipelined = sm80::Forward<cutlass::half_t, 64, 64, 64, 32, 4, 1>;
  using Grouped = sm80::Forward<cutlass::half_t, 64, 64, 64, 32, 4, 2>;
  using Tiled = sm80::Forward<cutlass::half_t, 160, 160, 64, 32, 4, 1>;
  return {{"sm80/f16/d64/64x32x4", DType::kFloat16,
           &simt::launch_host<Pipelined, IdentityScore, GeneralScore>, true},
          {"sm80/f16/d64/64x32x4x2", DType::kFloat16, &simt::launch_host<Grouped, IdentityScore>},
          {"sm80/f16/d160/64x32x4", DType::kFloat16, &simt::launch_host<Tiled, IdentityScore>}};
}
