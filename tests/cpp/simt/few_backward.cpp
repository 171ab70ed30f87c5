// The backward kernels on few cases, for mutants and for the race detector: those that show most
// bugs in little time.
#include <vector>

#include "backward_kernels.hpp"
#include "captures_case.hpp"
#include "check.hpp"

using namespace backward_case;

namespace {

TEST(few) {
  using Both = sm80::Backward<Half, Tile<64, 64, 128, 4>>;
  using Roles = sm80::Backward<Half, Tile<128, 32, 128, 8>>;
  using General = sm80::Backward<Half, Tile<64, 32, 128, 4>, with::GeneralScore>;
  Case c{.name = "causal groups", .seqlen_q = 150, .seqlen_k = 139, .mask = causal()};
  c.has_sinks = c.has_grad_lse = true;
  run<Both, IdentityScore, SoftcapScore>(c);
  c.head_dim = 128;
  run<Roles, IdentityScore, SoftcapScore>(c);
  Case w{.name = "window", .heads_q = 1, .seqlen_q = 160, .seqlen_k = 150, .mask = window(70, 3)};
  w.softcap = 1.5f;
  run<Both, IdentityScore, SoftcapScore>(w);
  Case d{.name = "dropout", .heads_q = 1, .seqlen_q = 40, .seqlen_k = 140, .dropout = 0.3f};
  run<General, GeneralScore>(d);
  Case b{.name = "bias", .heads_q = 1, .seqlen_q = 40, .softcap = 1.5f, .dropout = 0.3f};
  b.has_bias = true;
  run<BiasGrad<Half, Tile<64, 32, 128, 4>>, GeneralScore>(b);
  d.head_dim = 96;
  run<sm80::Backward<Half, Tile<96, 64, 128, 8>, with::Dropout>, IdentityScore>(d);
  Case wide{.name = "wide", .heads_q = 1, .seqlen_q = 80, .seqlen_k = 70, .mask = causal()};
  wide.head_dim = 256;
  run<sm80::Backward<Half, Tile<256, 32, 64, 8>>, IdentityScore>(wide);
}

// Beyond head dim 256 two warps share a role and divide the columns.
TEST(few_columns) {
  Case c{.name = "columns divided", .heads_q = 2, .seqlen_q = 50, .seqlen_k = 70, .mask = causal()};
  c.head_dim = 328;
  run<sm80::Backward<Half, Tile<512, 16, 32, 8>>, IdentityScore>(c);
  c.softcap = 1.5f, c.seqlen_q = 90;
  run<sm80::Backward<Half, Tile<512, 32, 32, 8>>, SoftcapScore>(c);
  Case b{.name = "bias", .heads_q = 1, .seqlen_q = 40, .softcap = 1.5f, .dropout = 0.3f};
  b.has_bias = true, b.head_dim = 512;
  run<BiasGrad<Half, Tile<512, 16, 32, 8>>, GeneralScore>(b);
}

TEST(few_terms) {
  using Both = sm80::Backward<Half, Tile<64, 64, 128, 4>>;
  using Roles = sm80::Backward<Half, Tile<128, 32, 128, 8>>;
  Case c{.name = "ALiBi", .heads_q = 3, .seqlen_q = 100, .seqlen_k = 139, .has_alibi = true};
  run<Both, Score<Alibi>>(c);
  c.softcap = 1.5f, c.head_dim = 128, c.heads_q = 2, c.mask = causal();
  run<Roles, Score<Softcap, Alibi>>(c);
  Case b{.name = "pairs", .heads_q = 2, .seqlen_q = 70, .seqlen_k = 138, .has_bias = true};
  b.has_short_bias = b.has_mask = true, b.softcap = 1.5f;
  run<Both, Score<Softcap, PairBias, PairMask>>(b);
}

// Gradients of tensors that a score_mod captures.
TEST(few_captures) {
  using captures::check_kernel;
  namespace mods = captures::mods;
  using Both = sm80::Backward<Half, Tile<64, 64, 128, 4>>;
  Case c{.name = "captures", .seqlen_q = 70, .seqlen_k = 139, .mask = causal()};
  check_kernel<Both, mods::Added>(c);
  check_kernel<sm80::Backward<Half, Tile<128, 32, 128, 8>>, mods::Scaled>(c);
  check_kernel<sm80::Backward<Half, Tile<512, 16, 32, 8>>, mods::Scaled>(c);
  Case masked{.name = "NaN", .heads_q = 1, .seqlen_k = 73, .mask = window(30, -4), .nan_keys = 4};
  check_kernel<Both, mods::Distance>(masked);
}

TEST(few_wgmma) {
  Case c{.name = "window", .heads_q = 1, .seqlen_q = 270, .seqlen_k = 210, .mask = window(150, 0)};
  run<sm90::Backward<Half, Wgmma64>, IdentityScore>(c, simt::FiberOrder::kRandom);
  c.heads_q = 2, c.seqlen_q = 170;  // the last step of a head has one tile of two
  run<sm90::Backward<Half, Wgmma64Q128>, IdentityScore>(c, simt::FiberOrder::kRandom);
  c.heads_q = 1, c.seqlen_q = 270;
  c.head_dim = 128, c.seqlen_k = 139;
  run<sm90::Backward<Half, Wgmma128>, IdentityScore>(c, simt::FiberOrder::kRandom);
  using Ordered = sm90::Backward<Half, Wgmma64, with::FixedOrder>;
  c.head_dim = 64, c.seqlen_q = 150, c.seqlen_k = 400, c.mask = causal();
  run<Ordered, IdentityScore>(c);
  c.seqlen_k = 1000, c.mask = {};
  run<Ordered, IdentityScore>(c, simt::FiberOrder::kReverse, 16);
  Case packed{.name = "packed", .batch = 3, .heads_q = 1, .seqlen_q = 70, .seqlen_k = 80};
  packed.cu_seqlens_q = {0, 70, 70, 101}, packed.cu_seqlens_k = {0, 60, 63, 143};
  run<sm90::Backward<Half, Wgmma64, with::PackedRows>, IdentityScore>(packed);
}

// Blocks that take several tiles of keys: of several heads, and the first tiles without queries.
TEST(few_persistent) {
  using Order = simt::FiberOrder;
  // No query sees the first two tiles of keys.
  Case c{.name = "no queries", .heads_q = 3, .heads_kv = 3, .seqlen_q = 130, .seqlen_k = 480};
  c.mask = window(60, 0);
  run<sm90::Backward<Half, Wgmma64Q128>, IdentityScore>(c, Order::kRandom, 2);
  c.head_dim = 128, c.heads_q = 4, c.heads_kv = 2;
  run<sm90::Backward<Half, Wgmma128>, IdentityScore>(c, Order::kRandom, 2);
  c.softcap = 1.5f;
  run<sm90::Backward<BFloat, Wgmma128>, SoftcapScore>(c);
  Case packed{.name = "packed", .batch = 4, .heads_q = 2, .seqlen_q = 70, .seqlen_k = 190};
  packed.head_dim = 128;
  packed.cu_seqlens_q = {0, 70, 70, 101, 130}, packed.cu_seqlens_k = {0, 60, 63, 253, 253};
  run<sm90::Backward<Half, Wgmma128, with::PackedRows>, IdentityScore>(packed, Order::kRandom, 2);
}

TEST(few_mask) {
  std::vector<Case> const cases = mask_cases(64);
  for (int i : {0, 1, 2}) run<Masked<Half, Wgmma64>, Score<MaskBits>>(cases[i]);
  for (Case c : {cases[0], cases[1]}) {
    c.head_dim = 128;
    run<Masked<Half, Wgmma128>, Score<MaskBits>>(c, simt::FiberOrder::kRandom, 2);
  }
}

TEST(few_two_pass) {
  Case c{.name = "window", .heads_q = 2, .seqlen_q = 330, .seqlen_k = 270, .mask = window(150, 0)};
  c.head_dim = 64, c.has_sinks = c.has_grad_lse = true;
  run<TwoPass<Half, 64, 64>, IdentityScore>(c, simt::FiberOrder::kRandom);
  c.head_dim = 128, c.head_dim_v = 64, c.mask = causal();
  run<TwoPass<Half, 128, 64>, IdentityScore>(c, simt::FiberOrder::kRandom);
  c.name = "one stage of V", c.head_dim = c.head_dim_v = 256, c.heads_q = 1, c.seqlen_q = 150;
  run<TwoPass<Half, 256, 256>, IdentityScore>(c, simt::FiberOrder::kRandom);
  c.name = "chunks", c.head_dim = c.head_dim_v = 64, c.mask.attention_chunk = 48;
  run<TwoPass<Half, 64, 64>, Score<Chunk>>(c);
  Case packed{.name = "packed", .batch = 3, .heads_q = 2, .seqlen_q = 70, .seqlen_k = 80};
  packed.cu_seqlens_q = {0, 70, 70, 101}, packed.cu_seqlens_k = {0, 60, 63, 143};
  run<TwoPass<Half, 64, 64, with::PackedRows>, IdentityScore>(packed);
}

// Roles that pass P on, and blocks that wait for each other.
TEST(races) {
  Case c{.name = "causal groups", .seqlen_q = 90, .seqlen_k = 139, .mask = causal()};
  run<sm80::Backward<Half, Tile<64, 64, 128, 4>, with::FixedOrder>, IdentityScore>(c);
  c.head_dim = 96;
  run<sm80::Backward<Half, Tile<96, 64, 128, 8>>, IdentityScore>(c);
  c.head_dim = 128;
  run<sm80::Backward<BFloat, Tile<128, 64, 128, 8>>, IdentityScore>(c);
  run<sm80::Backward<Half, Tile<128, 32, 128, 8>, with::FixedOrder>, IdentityScore>(c);
  run<BiasGrad<BFloat, Tile<128, 32, 64, 8>>, GeneralScore>(bias_cases(128)[3]);
  c.head_dim = 512, c.seqlen_q = 40, c.seqlen_k = 70;
  run<sm80::Backward<Half, Tile<512, 16, 32, 8>, with::FixedOrder>, IdentityScore>(c);
  c.head_dim = 64, c.has_bias = c.has_mask = true;
  run<sm80::Backward<Half, Tile<64, 32, 128, 4>, with::PackedRows, with::FixedOrder,
                     with::GeneralScore>,
      GeneralScore>(c);
}

TEST(few_wgmma_terms) {
  Case c{.name = "ALiBi", .heads_q = 3, .seqlen_q = 100, .seqlen_k = 139, .has_alibi = true};
  run<sm90::Backward<Half, Wgmma64>, Score<Alibi>>(c);
  c.softcap = 1.5f, c.head_dim = 128, c.heads_q = 2, c.mask = causal();
  run<sm90::Backward<Half, Wgmma128>, Score<Softcap, Alibi>>(c);
  c.has_alibi = false;
  run<sm90::Backward<Half, Wgmma128>, SoftcapScore>(c, simt::FiberOrder::kRandom);
  Case b{.name = "bias", .heads_q = 2, .seqlen_q = 70, .seqlen_k = 138, .has_bias = true};
  b.has_short_bias = true, b.softcap = 1.5f, b.mask = causal();
  run<WgmmaBias<Half, Wgmma64>, Score<Softcap, TileBias>, Score<Softcap, Alibi, TileBias>>(b);
  Case m = mask_cases(64)[0];
  m.has_alibi = true, m.softcap = 1.5f, m.has_sinks = false;
  run<Masked<Half, Wgmma64>, Score<Softcap, Alibi, MaskBits>>(m);
}

TEST(few_wgmma_dropout) {
  Case c{.name = "dropout", .heads_q = 2, .seqlen_q = 90, .seqlen_k = 210, .dropout = 0.3f};
  c.mask = causal(), c.has_grad_lse = true;
  run<WgmmaDropout<Half, Wgmma64>, IdentityScore>(c);
  c.head_dim = 128, c.seqlen_k = 139;
  run<WgmmaDropout<Half, Wgmma128>, IdentityScore>(c, simt::FiberOrder::kRandom);
  Case m = mask_cases(64)[0];
  m.dropout = 0.3f;
  run<WgmmaDropout<Half, Wgmma64, with::Mask>, Score<MaskBits>>(m);
}

TEST(few_wgmma_bias_grad) {
  Case c{.name = "bias", .batch = 2, .heads_q = 2, .seqlen_q = 140, .seqlen_k = 270};
  c.has_bias = c.has_short_bias = true, c.mask = causal();
  run<WgmmaBiasGrad<Half, Wgmma64>, Score<TileBias>>(c);
  c.bias_of = {true, true, true, true};
  run<WgmmaBiasGrad<Half, Wgmma64>, Score<TileBias>>(c);
  c.bias_of = {true, false, false, true}, c.has_mask = true, c.mask_of = {true, false, false, true};
  run<WgmmaBiasGrad<Half, Wgmma64, with::Mask>, Score<MaskBits, TileBias>>(c);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
