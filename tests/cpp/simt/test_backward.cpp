// The backward kernels of mma.sync and of wgmma on the CPU, with tiles of each kind, against
// gradients in fp64.
#include <array>
#include <string>
#include <vector>

#include "backward_kernels.hpp"
#include "check.hpp"

using namespace backward_case;

namespace {

template <class Kernel, class... Scores>
void run_plain() {
  for (Case const& c : common_cases(Kernel::Config::kHeadDim, Kernel::Config::kBlockN)) {
    run<Kernel, Scores...>(c);
  }
}

template <class Kernel>
void run_common() {
  run_plain<Kernel, IdentityScore, SoftcapScore>();
  Case softcap{.name = "softcap", .head_dim = Kernel::Config::kHeadDim, .softcap = 1.5f};
  run<Kernel, IdentityScore, SoftcapScore>(softcap);
}

template <class Kernel>
void run_alibi() {
  for (Case const& c : alibi_cases(Kernel::Config::kHeadDim)) {
    run<Kernel, IdentityScore, SoftcapScore, Score<Alibi>, Score<Softcap, Alibi>>(c);
  }
}

template <class Kernel, class... Pairs>
void run_pairs() {
  constexpr bool kHasBias =
      (std::is_same_v<Pairs, PairBias> || ...) || (std::is_same_v<Pairs, TileBias> || ...);
  constexpr bool kHasMask = (std::is_same_v<Pairs, PairMask> || ...);
  for (Case const& c : pair_cases(Kernel::Config::kHeadDim, kHasBias, kHasMask)) {
    run<Kernel, Score<Pairs...>, Score<Softcap, Pairs...>, Score<Alibi, Pairs...>,
        Score<Softcap, Alibi, Pairs...>>(c);
  }
}

template <class Kernel>
void run_dropout() {
  Case c{.name = "dropout", .head_dim = Kernel::Config::kHeadDim};
  for (float p : {0.3f, 0.9f, 1.0f}) {
    c.dropout = p;
    run<Kernel, IdentityScore>(c);
    c.has_grad_lse = c.has_sinks = true;
    c.seqlen_q = 90, c.seqlen_k = 140, c.mask = causal();
    run<Kernel, IdentityScore>(c);
  }
}

template <class Kernel>
void run_general() {
  run_plain<Kernel, GeneralScore>();
  for (Case const& c : general_cases(Kernel::Config::kHeadDim)) run<Kernel, GeneralScore>(c);
}

template <class Kernel>
void run_masked() {
  for (Case const& c : mask_cases(Kernel::Config::kHeadDim)) run<Kernel, Score<MaskBits>>(c);
  Case narrow = mask_cases(Kernel::Config::kHeadDim - 24)[0];
  run<Kernel, Score<MaskBits>>(narrow);
}

TEST(dropout) {
  run_dropout<sm80::Backward<Half, Tile<64, 64, 128, 4>, with::Dropout>>();
  run_dropout<sm80::Backward<BFloat, Tile<128, 32, 128, 8>, with::Dropout>>();
  run_dropout<sm80::Backward<BFloat, Tile<128, 64, 128, 8>, with::Dropout>>();
  run_dropout<sm80::Backward<Half, Tile<256, 32, 64, 8>, with::Dropout>>();
}

TEST(one_role) {
  run_common<sm80::Backward<Half, Tile<64, 64, 128, 4>>>();
  run_common<sm80::Backward<BFloat, Tile<64, 64, 128, 8>>>();
}

TEST(two_roles) {
  run_common<sm80::Backward<BFloat, Tile<128, 64, 128, 8>>>();
  run_common<sm80::Backward<Half, Tile<128, 32, 128, 8>>>();
  run_common<sm80::Backward<Half, Tile<96, 64, 128, 8>>>();
}

TEST(wide_heads) {
  run_common<sm80::Backward<Half, Tile<256, 32, 64, 8>>>();
  run_common<sm80::Backward<Half, Tile<256, 64, 64, 8>>>();
  run_common<sm80::Backward<Half, Tile<192, 32, 64, 8>>>();
}

TEST(wgmma) {
  run_plain<sm90::Backward<Half, Wgmma64>, IdentityScore>();
  run_plain<sm90::Backward<BFloat, Wgmma64Q128>, IdentityScore>();
  run_plain<sm90::Backward<BFloat, Wgmma128>, IdentityScore>();
  run_plain<sm90::Backward<BFloat, Wgmma64, with::FixedOrder>, IdentityScore>();
  run_plain<sm90::Backward<Half, Wgmma128, with::FixedOrder>, IdentityScore>();
}

template <class Kernel>
void run_softcap() {
  for (Case c : common_cases(Kernel::Config::kHeadDim, Kernel::Config::kBlockN)) {
    c.softcap = c.magnitude > 1.0f ? 30.0f : 1.5f;
    run<Kernel, SoftcapScore>(c);
  }
}
TEST(wgmma_softcap) {
  run_softcap<sm90::Backward<Half, Wgmma64>>();
  run_softcap<sm90::Backward<BFloat, Wgmma128>>();
}

TEST(wgmma_mask) {
  run_masked<Masked<Half, Wgmma64>>();
  run_masked<Masked<BFloat, Wgmma128>>();
}

template <class Kernel, class... Terms>
void run_masked_terms() {
  for (Case c : mask_cases(Kernel::Config::kHeadDim)) {
    if (c.seqlen_q > 1000) continue;
    c.has_alibi = (std::is_same_v<Terms, Alibi> || ...);
    c.has_bias = c.has_short_bias = (std::is_same_v<Terms, TileBias> || ...);
    if (c.has_bias && c.seqlen_k == 1) continue;  // the gradient is 0 except for rounding
    if ((std::is_same_v<Terms, Softcap> || ...)) c.softcap = c.magnitude > 1.0f ? 30.0f : 1.5f;
    run<Kernel, Score<Terms...>>(c);
  }
}
TEST(wgmma_mask_terms) {
  run_masked_terms<Masked<Half, Wgmma64>, Softcap, MaskBits>();
  run_masked_terms<Masked<BFloat, Wgmma128>, Alibi, MaskBits>();
  run_masked_terms<WgmmaBias<Half, Wgmma64, with::Mask>, MaskBits, TileBias>();
}

TEST(wgmma_dropout) {
  run_dropout<WgmmaDropout<Half, Wgmma64>>();
  run_dropout<WgmmaDropout<BFloat, Wgmma128>>();
  for (Case c : mask_cases(64)) {
    if (c.seqlen_q > 1000 || c.magnitude > 1.0f) continue;
    c.dropout = 0.3f;
    run<WgmmaDropout<Half, Wgmma64, with::Mask>, Score<MaskBits>>(c);
  }
}

// Biases that are read for two keys at a time, of each kind of shape.
template <class Kernel, class Score>
void run_bias_grad(bool has_mask) {
  for (Case c : bias_cases(Kernel::Config::kHeadDim)) {
    if (!c.bias_of[3]) continue;
    c.softcap = c.dropout = 0.0f;
    c.has_short_bias = true, c.has_mask = has_mask;
    run<Kernel, Score>(c);
  }
}
TEST(wgmma_bias_grad) {
  run_bias_grad<WgmmaBiasGrad<Half, Wgmma64>, Score<TileBias>>(false);
  run_bias_grad<WgmmaBiasGrad<BFloat, Wgmma128>, Score<TileBias>>(false);
  run_bias_grad<WgmmaBiasGrad<Half, Wgmma64, with::Mask>, Score<MaskBits, TileBias>>(true);
}

TEST(two_pass) {
  run_plain<TwoPass<Half, 256, 256>, IdentityScore>();
  run_plain<TwoPass<BFloat, 192, 192>, IdentityScore>();
  for (Case c : common_cases(192, 64)) {
    c.head_dim_v = 128 - (c.head_dim % 16);
    run<TwoPass<BFloat, 192, 128>, IdentityScore>(c);
  }
}
TEST(two_pass_chunks) {
  for (Case c : general_cases(192)) {
    if (c.mask.attention_chunk != 0) run<TwoPass<Half, 192, 192>, IdentityScore, Score<Chunk>>(c);
  }
}

TEST(alibi_one_role) { run_alibi<sm80::Backward<Half, Tile<64, 64, 128, 4>>>(); }

TEST(wgmma_alibi) {
  run_alibi<sm90::Backward<BFloat, Wgmma64>>();
  run_alibi<sm90::Backward<Half, Wgmma128>>();
}

TEST(wgmma_bias) {
  run_pairs<WgmmaBias<Half, Wgmma64>, TileBias>();
  run_pairs<WgmmaBias<BFloat, Wgmma128>, TileBias>();
}

TEST(alibi_two_roles) {
  run_alibi<sm80::Backward<BFloat, Tile<128, 32, 128, 8>>>();
  run_alibi<sm80::Backward<Half, Tile<256, 32, 64, 8>>>();
}

TEST(pairs_one_role) {
  using Kernel = sm80::Backward<Half, Tile<64, 64, 128, 4>>;
  run_pairs<Kernel, PairBias>();
  run_pairs<Kernel, PairBias, PairMask>();
}

TEST(pairs_two_roles) {
  run_pairs<sm80::Backward<BFloat, Tile<128, 32, 64, 8>>, PairBias>();
  run_pairs<sm80::Backward<Half, Tile<128, 64, 128, 8>>, PairMask>();
}

TEST(general_one_role) {
  run_general<sm80::Backward<Half, Tile<64, 32, 128, 4>, with::GeneralScore>>();
}

TEST(general_two_roles) {
  run_general<sm80::Backward<BFloat, Tile<128, 32, 64, 8>, with::GeneralScore>>();
  run_general<sm80::Backward<Half, Tile<256, 16, 64, 8>, with::GeneralScore>>();
}

TEST(bias_one_role) {
  using Kernel = BiasGrad<Half, Tile<64, 32, 128, 4>>;
  for (Case const& c : bias_cases(64)) run<Kernel, GeneralScore>(c);
  Case c{.name = "packed",
         .batch = 3,
         .heads_q = 2,
         .seqlen_q = 70,
         .seqlen_k = 80,
         .mask = causal(),
         .has_bias = true,
         .cu_seqlens_q = {0, 70, 70, 101},
         .cu_seqlens_k = {0, 60, 63, 143}};
  run<Kernel, GeneralScore>(c);
}

TEST(bias_two_roles) {
  std::vector<Case> const cases = bias_cases(128);
  for (int i : {1, 3}) run<BiasGrad<BFloat, Tile<128, 32, 64, 8>>, GeneralScore>(cases[i]);
}

TEST(in_order) {
  run_common<sm80::Backward<Half, Tile<64, 64, 128, 4>, with::FixedOrder>>();
  run_common<sm80::Backward<Half, Tile<128, 32, 128, 8>, with::FixedOrder>>();
  run_plain<sm80::Backward<Half, Tile<256, 32, 64, 8>, with::FixedOrder>, IdentityScore>();
  run_general<sm80::Backward<Half, Tile<64, 32, 128, 4>, with::PackedRows, with::FixedOrder,
                             with::GeneralScore>>();
  run_alibi<sm80::Backward<Half, Tile<64, 64, 128, 4>, with::FixedOrder>>();
}

TEST(packed_sequences) {
  using Kernel = sm80::Backward<Half, Tile<64, 64, 128, 4>, with::PackedRows>;
  using Roles = sm80::Backward<Half, Tile<128, 32, 128, 8>, with::PackedRows>;
  using General = sm80::Backward<Half, Tile<64, 32, 128, 4>, with::PackedRows, with::GeneralScore>;
  Case c{.name = "packed",
         .batch = 5,
         .heads_q = 4,
         .heads_kv = 2,
         .seqlen_q = 140,
         .seqlen_k = 150,
         .mask = causal(),
         .has_sinks = true,
         .has_grad_lse = true,
         .cu_seqlens_q = {0, 140, 140, 141, 210, 275},
         .cu_seqlens_k = {0, 130, 133, 133, 283, 340}};
  run<Kernel, IdentityScore>(c);
  run<General, GeneralScore>(c);
  Case alibi = c;
  alibi.has_alibi = true;
  run<Kernel, Score<Alibi>>(alibi);
  alibi.softcap = 1.5f, alibi.mask = {};
  run<Kernel, Score<Softcap, Alibi>>(alibi);
  run<sm90::Backward<BFloat, Wgmma64, with::PackedRows>, IdentityScore>(c);
  c.head_dim = 128;
  run<Roles, IdentityScore>(c);
  run<sm90::Backward<Half, Wgmma128, with::PackedRows>, IdentityScore>(c);
  c.head_dim = 256;
  run<TwoPass<Half, 256, 256, with::PackedRows>, IdentityScore>(c);
  c.head_dim = 192, c.head_dim_v = 128;
  run<TwoPass<BFloat, 192, 128, with::PackedRows>, IdentityScore>(c);
  Case dense{.name = "dense in a varlen kernel", .batch = 2, .mask = causal()};
  run<Kernel, IdentityScore>(dense);
  run<sm90::Backward<Half, Wgmma64, with::PackedRows>, IdentityScore>(dense);
  run<TwoPass<Half, 64, 64, with::PackedRows>, IdentityScore>(dense);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
