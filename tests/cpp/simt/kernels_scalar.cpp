#include "scalar/minimal.hpp"
#include "scalar/tiled.hpp"
#include "scalar/vectorized.hpp"
#include "simt/host_unit.hpp"
#include "simt/kernels_under_test.hpp"

using namespace cutlass_attn;

// Of the vectorized kernel: two groups of warps with elements of 16 and of 32 bits, and one group
// that takes the head dimension in chunks.
std::vector<KernelUnderTest> kernels_under_test() {
  using Half = scalar::Vectorized<cutlass::half_t, 64>;
  using Single = scalar::Vectorized<float, 64>;
  using Chunked = scalar::Vectorized<cutlass::bfloat16_t, 128>;
  return {{"scalar/minimal/f32", DType::kFloat32,
           &simt::launch_on_host<scalar::Minimal<float>, IdentityScore, GeneralScore>, true},
          {"scalar/tiled/f32", DType::kFloat32,
           &simt::launch_on_host<scalar::Tiled<float, 64>, IdentityScore, GeneralScore>, true},
          {"scalar/vectorized/f16/d64", DType::kFloat16,
           &simt::launch_on_host<Half, IdentityScore, GeneralScore>, true, 64, false},
          {"scalar/vectorized/f32/d64", DType::kFloat32,
           &simt::launch_on_host<Single, IdentityScore, GeneralScore>},
          {"scalar/vectorized/bf16/d128", DType::kBFloat16,
           &simt::launch_on_host<Chunked, IdentityScore, GeneralScore>, true, 128, false}};
}
