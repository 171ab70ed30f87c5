#include <vector>

#include "simt/host_unit.hpp"
#include "simt/kernels_under_test.hpp"
#include "simt/packed.hpp"
#include "sm80/quantized/forward.hpp"

using namespace cutlass_attn;

namespace {

// With the workspace that the launches share, full of garbage before.
template <class Kernel, class... Scores>
Status launch_on_host(Problem const& problem, RunOptions const& given) {
  std::vector<char> workspace(size_t(Kernel::Params::workspace_bytes(problem, {}, {})), char(0xff));
  RunOptions options = given;
  options.workspace = {workspace.data(), int64_t(workspace.size())};
  return simt::launch_with_pre_post_on_host<Kernel, Scores...>(problem, options);
}

// As packed sequences. Three keys after each sequence are ignored; between two sequences is one
// with half the keys and no queries. Slots, scales and shifts therefore differ from those of the
// dense call.
template <class Kernel, class... Scores>
Status run_packed(Problem const& problem, RunOptions const& options) {
  Problem beside = problem;
  beside.seq_q.seqlen = 0;
  beside.seq_k.seqlen /= 2;
  packed::Packed packed({beside, problem, beside}, 3);
  Status const status = launch_on_host<Kernel, Scores...>(packed.problem, options);
  packed.give_back();
  return status;
}

}  // namespace

// Q K^T in int8 with each schedule that has it, and P V in 8 bits as well.
std::vector<KernelUnderTest> kernels_under_test() {
  using Pipelined = sm80::Forward<cutlass::half_t, TileShape<64, 64, 64, 64, 4>,
                                  with::Accumulators<int32_t, float>>;
  using Tiled = sm80::Forward<cutlass::half_t, TileShape<128, 128, 128, 32, 4>,
                              with::Accumulators<int32_t, float>>;
  KernelUnderTest pipelined{"sm80/int8_qk/f16/d64/64x64x4, pipelined", DType::kFloat16,
                            &launch_on_host<Pipelined, IdentityScore, SoftcapScore>};
  KernelUnderTest general{"sm80/int8_qk_general/f16/d64/64x64x4", DType::kFloat16,
                          &launch_on_host<Pipelined, GeneralScore>, true};
  KernelUnderTest tiled{"sm80/int8_qk/f16/d128/128x32x4, tiled", DType::kFloat16,
                        &launch_on_host<Tiled, IdentityScore, SoftcapScore>, false, 128};
  using TwoScales = sm80::Forward<cutlass::half_t, TileShape<64, 64, 64, 128, 4>,
                                  with::Accumulators<int32_t, float>>;
  KernelUnderTest two_scales{"sm80/int8_qk/f16/d64/64x128x4, two tiles of scales", DType::kFloat16,
                             &launch_on_host<TwoScales, IdentityScore, SoftcapScore>};
  using Int8 = sm80::Forward<cutlass::half_t, TileShape<64, 64, 64, 64, 4>,
                             with::Accumulators<int32_t, int32_t>>;
  KernelUnderTest int8{"sm80/int8/f16/d64/64x64x4", DType::kFloat16,
                       &launch_on_host<Int8, IdentityScore, SoftcapScore>};
  KernelUnderTest int8_general{"sm80/int8_general/f16/d64/64x64x4", DType::kFloat16,
                               &launch_on_host<Int8, GeneralScore>, true};
  using Int8Tight = sm80::Forward<cutlass::half_t, TileShape<128, 128, 128, 64, 4>,
                                  with::Accumulators<int32_t, int32_t>>;
  KernelUnderTest int8_tight{"sm80/int8/f16/d128/128x64x4, two key blocks", DType::kFloat16,
                             &launch_on_host<Int8Tight, IdentityScore, SoftcapScore>, false, 128};
  using Int8At256 = sm80::Forward<cutlass::half_t, TileShape<256, 256, 64, 64, 4>,
                                  with::Accumulators<int32_t, int32_t>>;
  KernelUnderTest int8_at_256{"sm80/int8/f16/d256/64x64x4, one buffer", DType::kFloat16,
                              &launch_on_host<Int8At256, IdentityScore, SoftcapScore>, false, 256};
  using Fp8 = sm80::Forward<cutlass::half_t, TileShape<64, 64, 64, 64, 4>,
                            with::Accumulators<int32_t, cutlass::half_t>>;
  KernelUnderTest fp8{"sm89/int8_fp8/f16/d64/64x64x4", DType::kFloat16,
                      &launch_on_host<Fp8, IdentityScore, SoftcapScore>};
  KernelUnderTest fp8_general{"sm89/int8_fp8_general/f16/d64/64x64x4", DType::kFloat16,
                              &launch_on_host<Fp8, GeneralScore>, true};
  using Fp8Wide = sm80::Forward<cutlass::half_t, TileShape<64, 64, 128, 64, 4>,
                                with::Accumulators<int32_t, cutlass::half_t>>;
  KernelUnderTest fp8_wide{"sm89/int8_fp8/f16/d64/128x64x4, two key blocks", DType::kFloat16,
                           &launch_on_host<Fp8Wide, IdentityScore, SoftcapScore>};
  using QkVarlen = sm80::Forward<cutlass::half_t, TileShape<64, 64, 64, 64, 4>,
                                 with::Accumulators<int32_t, float>, with::PackedRows>;
  KernelUnderTest qk_varlen{"sm80/int8_qk_varlen/f16/d64/64x64x4, packed", DType::kFloat16,
                            &run_packed<QkVarlen, IdentityScore, SoftcapScore>};
  using Int8Varlen = sm80::Forward<cutlass::half_t, TileShape<64, 64, 64, 64, 4>,
                                   with::Accumulators<int32_t, int32_t>, with::PackedRows>;
  KernelUnderTest int8_varlen{"sm80/int8_varlen/f16/d64/64x64x4, packed", DType::kFloat16,
                              &run_packed<Int8Varlen, IdentityScore, SoftcapScore>};
  for (KernelUnderTest* kernel : {&pipelined, &general, &tiled, &two_scales, &qk_varlen}) {
    kernel->quantize = Quantize::kQk;
  }
  for (KernelUnderTest* kernel : {&int8, &int8_general, &int8_tight, &int8_at_256, &int8_varlen}) {
    kernel->quantize = Quantize::kInt8;
  }
  for (KernelUnderTest* kernel : {&fp8, &fp8_wide, &fp8_general}) kernel->quantize = Quantize::kFp8;
  return {pipelined, general,     tiled,     two_scales,  int8,       int8_general, fp8,
          fp8_wide,  fp8_general, qk_varlen, int8_varlen, int8_tight, int8_at_256};
}
