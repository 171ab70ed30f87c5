#include <cstring>

#include "simt/host_unit.hpp"
#include "simt/kernels_under_test.hpp"
#include "sm80/forward.hpp"

using namespace cutlass_attn;

// One kernel for each schedule of the main loop, one with fp16 accumulation, two with dropout and
// two with ALiBi (simt_kernels has others).
std::vector<KernelUnderTest> kernels_under_test() {
  using Pipelined = sm80::Forward<cutlass::half_t, TileShape<64, 64, 64, 64, 4>>;
  using Tiled = sm80::Forward<cutlass::half_t, TileShape<160, 160, 64, 32, 4>>;
  using Split = sm80::Forward<cutlass::half_t, TileShape<512, 512, 32, 32, 2, 4>>;
  using Half = sm80::Forward<cutlass::half_t, TileShape<160, 160, 64, 32, 4>,
                             with::Accumulators<cutlass::half_t, cutlass::half_t>>;
  using PipelinedDropout =
      sm80::Forward<cutlass::half_t, TileShape<64, 64, 128, 64, 4>, with::Dropout>;
  using TiledDropout =
      sm80::Forward<cutlass::half_t, TileShape<128, 128, 128, 32, 4>, with::Dropout>;
  std::vector<KernelUnderTest> kernels = {
      {"sm80/f16/d64/64x64x4, pipelined", DType::kFloat16,
       &simt::launch_on_host<Pipelined, IdentityScore, GeneralScore>, true},
      {"sm80/f16/d160/64x32x4, tiled", DType::kFloat16,
       &simt::launch_on_host<Tiled, IdentityScore, GeneralScore>, true},
      {"sm80/f16/d512/32x32x2c4, split", DType::kFloat16,
       &simt::launch_on_host<Split, IdentityScore, GeneralScore>, true, 512},
      {"sm80/fp16/f16/d160/64x32x4, tiled", DType::kFloat16,
       &simt::launch_on_host<Half, IdentityScore>, false, 64, true, false, Accumulate::kFloat16},
      {"sm80/dropout/f16/d64/128x64x4, pipelined", DType::kFloat16,
       &simt::launch_on_host<PipelinedDropout, IdentityScore>},
      {"sm80/dropout/f16/d128/128x32x4, tiled", DType::kFloat16,
       &simt::launch_on_host<TiledDropout, IdentityScore>, false, 128},
      {"sm80/f16/d64/64x64x4, pipelined, ALiBi", DType::kFloat16,
       &simt::launch_on_host<Pipelined, Score<Alibi>, Score<Softcap, Alibi>>},
      {"sm80/f16/d160/64x32x4, tiled, ALiBi", DType::kFloat16,
       &simt::launch_on_host<Tiled, Score<Alibi>, Score<Softcap, Alibi>>}};
  for (auto& kernel : kernels) {
    kernel.drops = std::strstr(kernel.name, "dropout");
    kernel.has_alibi = std::strstr(kernel.name, "ALiBi");
  }
  return kernels;
}
