#include "core/vector.hpp"
#include "simt/host_unit.hpp"
#include "simt/kernels_under_test.hpp"
#include "sm80/forward.hpp"

using namespace cutlass_attn;

namespace {

using Half = cutlass::half_t;

template <int kHeadDim, int kBlockM, class... Options>
using Kernel = sm80::Forward<Half, TileShape<kHeadDim, kHeadDim, kBlockM, 64, 4>, Options...>;

// With a workspace of garbage, of the size that is reported before a kernel is compiled.
template <class Kernel, class... Scores>
Status launch_with_map(Problem const& problem, RunOptions const&) {
  using Params = typename Kernel::Params;
  KernelFacts known;
  known.block_m = Kernel::kBlockM, known.block_n = Kernel::kBlockN;
  std::vector<Vector16> workspace(size_t(Params::workspace_bytes(problem, {}, known) + 15) / 16,
                                  Vector16{~uint64_t(0), ~uint64_t(0)});
  RunOptions options;
  options.workspace = {workspace.data(), int64_t(workspace.size()) * 16};
  return simt::launch_with_pre_post_on_host<Kernel, Scores...>(problem, options);
}

KernelUnderTest of(char const* name, decltype(KernelUnderTest::launch) launch,
                   decltype(KernelUnderTest::cases) cases, int head_dim) {
  KernelUnderTest kernel{name, DType::kFloat16, launch};
  kernel.cases = cases;
  kernel.head_dim = head_dim;
  return kernel;
}

}  // namespace

// Calls with a bias, a bool mask, or both, and with dropout and other terms, in the two schedules
// that implement them; and with the largest logits, in all schedules.
std::vector<KernelUnderTest> kernels_under_test() {
  using simt::launch_on_host;
  using Bias = Kernel<64, 64, with::Bias>;
  using Mask = Kernel<64, 64, with::Mask>;
  using BiasMask = Kernel<64, 128, with::Bias, with::Mask>;
  using TiledBias = Kernel<128, 128, with::Bias>;
  using AnyBias = Kernel<64, 64, with::AnyBias>;
  using TiledAnyBias = Kernel<128, 128, with::AnyBias>;
  using TiledMask = Kernel<128, 128, with::Mask>;
  using Dropout = Kernel<64, 128, with::Dropout>;
  using TiledDropout = Kernel<128, 128, with::Dropout>;
  using Pipelined = Kernel<64, 64>;
  using Tiled = Kernel<128, 128>;
  using SplitShape = TileShape<512, 512, 32, 32, 2, 4>;
  using Split = sm80::Forward<Half, SplitShape>;
  using SplitBiasMask = sm80::Forward<Half, SplitShape, with::AnyBias, with::Mask>;
  using SplitDropout = sm80::Forward<Half, SplitShape, with::Dropout>;
  return {of("sm80/bias/f16/d64/64x64x4, pipelined",
             &launch_on_host<Bias, Score<TileBias>, Score<Softcap, Alibi, TileBias, Chunk>>,
             &attention_case::few_bias_cases, 64),
          of("sm80/mask/f16/d64/64x64x4, pipelined",
             &launch_with_map<Mask, Score<MaskBits>, Score<Softcap, Alibi, MaskBits>>,
             &attention_case::few_mask_cases, 64),
          of("sm80/bias_mask/f16/d64/128x64x4, pipelined",
             &launch_with_map<BiasMask, Score<TileBias, MaskBits>,
                              Score<Softcap, Alibi, TileBias, MaskBits>>,
             &attention_case::few_bias_mask_cases, 64),
          of("sm80/bias/f16/d128/128x64x4, tiled",
             &launch_on_host<TiledBias, Score<TileBias>, Score<Softcap, Alibi, TileBias, Chunk>>,
             &attention_case::few_bias_cases, 128),
          of("sm80/any_bias/f16/d64/64x64x4, pipelined",
             &launch_on_host<AnyBias, Score<TileBias>, Score<Softcap, Alibi, TileBias, Chunk>>,
             &attention_case::few_any_bias_cases, 64),
          of("sm80/any_bias/f16/d128/128x64x4, tiled",
             &launch_on_host<TiledAnyBias, Score<TileBias>, Score<Softcap, Alibi, TileBias, Chunk>>,
             &attention_case::few_any_bias_cases, 128),
          of("sm80/any_bias_mask/f16/d512/32x32x2c4, split",
             &launch_with_map<SplitBiasMask, Score<TileBias, MaskBits>,
                              Score<Softcap, Alibi, TileBias, MaskBits>>,
             &attention_case::few_bias_mask_cases, 512),
          of("sm80/dropout/f16/d512/32x32x2c4, split",
             &launch_on_host<SplitDropout, Score<Softcap, Alibi>>,
             &attention_case::few_dropout_term_cases, 512),
          of("sm80/mask/f16/d128/128x64x4, tiled",
             &launch_with_map<TiledMask, Score<MaskBits>, Score<Softcap, Alibi, MaskBits>>,
             &attention_case::few_mask_cases, 128),
          of("sm80/dropout/f16/d64/128x64x4, pipelined",
             &launch_on_host<Dropout, Score<Softcap, Alibi>>,
             &attention_case::few_dropout_term_cases, 64),
          of("sm80/dropout/f16/d128/128x64x4, tiled",
             &launch_on_host<TiledDropout, Score<Softcap, Alibi>>,
             &attention_case::few_dropout_term_cases, 128),
          of("sm80/max_logit/f16/d64/64x64x4, pipelined",
             &launch_on_host<Pipelined, Score<MaxLogit>, Score<Softcap, MaxLogit>>,
             &attention_case::few_max_logit_cases, 64),
          of("sm80/max_logit/f16/d128/128x64x4, tiled",
             &launch_on_host<Tiled, Score<MaxLogit>, Score<Softcap, MaxLogit>>,
             &attention_case::few_max_logit_cases, 128),
          of("sm80/max_logit/f16/d512/32x32x2c4, split",
             &launch_on_host<Split, Score<MaxLogit>, Score<Softcap, MaxLogit>>,
             &attention_case::few_max_logit_cases, 512)};
}
