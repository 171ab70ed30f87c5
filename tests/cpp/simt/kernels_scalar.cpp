#include "scalar/minimal.hpp"
#include "scalar/tiled.hpp"
#include "simt/host_launch.hpp"
#include "simt/kernels_under_test.hpp"

using namespace cutlass_attn;

std::vector<KernelUnderTest> kernels_under_test() {
  return {{"scalar/minimal/f32", DType::kFloat32,
           &simt::launch_host<scalar::Minimal<float>, IdentityScore, GeneralScore>, true},
          {"scalar/tiled/f32", DType::kFloat32,
           &simt::launch_host<scalar::Tiled<float, 64>, IdentityScore, GeneralScore>, true}};
}
