#include "simt/host_unit.hpp"
#include "simt/kernels_under_test.hpp"
#include "wmma/forward.hpp"

using namespace cutlass_attn;

// Both fragment shapes, and a head dimension whose O is stored in several parts.
std::vector<KernelUnderTest> kernels_under_test() {
  using Square = wmma::Forward<cutlass::half_t, 64, 128, 64, 8, 16, 16>;
  using Wide = wmma::Forward<cutlass::half_t, 128, 64, 64, 4, 8, 32>;
  return {{"wmma/f16/d64/128x64x8", DType::kFloat16, &simt::launch_on_host<Square, IdentityScore>},
          {"wmma/8x32x16/f16/d128/64x64x4", DType::kFloat16,
           &simt::launch_on_host<Wide, IdentityScore, SoftcapScore>, false, 128}};
}
