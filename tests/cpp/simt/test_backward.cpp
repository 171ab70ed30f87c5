// The backward kernels of mma.sync and of wgmma on the CPU, at tiles of each kind, against
// gradients in fp64.
#include <array>
#include <string>
#include <vector>

#include "backward_case.hpp"
#include "check.hpp"
#include "sm80/backward.hpp"
#include "sm90/backward.hpp"
#include "sm90/backward_two_pass.hpp"

using namespace backward_case;

namespace {

// What every kernel takes.
std::vector<Case> common_cases(int head_dim, int block_n) {
  std::vector<Case> cases = {
      {.name = "plain", .seqlen_q = 70, .seqlen_k = block_n + 9},
      {.name = "causal", .seqlen_q = 200, .seqlen_k = 200, .mask = causal()},
      {.name = "more queries", .seqlen_q = 150, .seqlen_k = 37, .mask = causal()},
      {.name = "more keys", .seqlen_q = 37, .seqlen_k = 150, .mask = causal()},
      {.name = "window", .seqlen_q = 180, .seqlen_k = 160, .mask = window(19, 3)},
      {.name = "groups", .batch = 2, .heads_q = 6, .heads_kv = 2, .seqlen_q = 33, .seqlen_k = 65},
      {.name = "one key", .seqlen_q = 5, .seqlen_k = 1},
      {.name = "one query", .seqlen_q = 1, .seqlen_k = 140},
      {.name = "LSE and sinks", .has_sinks = true, .has_grad_lse = true},
      {.name = "large", .scale = 1.0f, .magnitude = 8.0f},
  };
  Case narrow{.name = "narrow"};
  for (Case& c : cases) c.head_dim = head_dim;
  narrow.head_dim = head_dim - 8;
  narrow.head_dim_v = head_dim - 24;
  cases.push_back(narrow);
  return cases;
}

std::vector<Case> general_cases(int head_dim) {
  Mask chunks = causal();
  chunks.attention_chunk = 48;
  std::vector<Case> cases = {
      {.name = "bias and mask", .has_bias = true, .has_mask = true},
      {.name = "ALiBi", .mask = causal(), .has_alibi = true},
      {.name = "chunks", .seqlen_q = 130, .seqlen_k = 150, .mask = chunks},
      {.name = "softcap", .softcap = 1.5f, .has_bias = true},
      {.name = "negative scale", .scale = -0.2f, .has_mask = true},
      {.name = "dropout", .seqlen_q = 90, .seqlen_k = 140, .mask = causal(), .dropout = 0.3f},
      {.name = "dropout and softcap", .softcap = 2.0f, .dropout = 0.5f},
  };
  for (Case& c : cases) c.head_dim = head_dim;
  return cases;
}

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

// Scores that are composed for the call, with each option that they have.
std::vector<Case> alibi_cases(int head_dim) {
  std::vector<Case> cases = {
      {.name = "ALiBi", .seqlen_q = 150, .seqlen_k = 137},
      {.name = "causal ALiBi", .seqlen_q = 137, .seqlen_k = 150, .mask = causal()},
      {.name = "ALiBi, more queries", .seqlen_q = 180, .seqlen_k = 70, .mask = window(90, 30)},
      {.name = "ALiBi of groups", .batch = 2, .heads_q = 6, .heads_kv = 2, .seqlen_k = 33},
      {.name = "ALiBi, one key", .seqlen_q = 5, .seqlen_k = 1},
      {.name = "ALiBi, large", .scale = 1.0f, .magnitude = 4.0f},
      {.name = "ALiBi, negative scale", .scale = -0.2f},
  };
  cases[1].has_grad_lse = true;
  for (Case& c : cases) {
    c.head_dim = head_dim;
    c.has_alibi = true;
  }
  for (int i : {0, 1, 3, 5}) {
    Case c = cases[i];
    c.name = "softcap and " + c.name;
    c.softcap = c.magnitude > 1.0f ? 30.0f : 1.5f;
    cases.push_back(c);
  }
  return cases;
}

template <class Kernel>
void run_alibi() {
  for (Case const& c : alibi_cases(Kernel::Config::kHeadDim)) {
    run<Kernel, IdentityScore, SoftcapScore, Score<Alibi>, Score<Softcap, Alibi>>(c);
  }
}

// A bias and a mask that are read for two keys at a time.
std::vector<Case> pair_cases(int head_dim, bool has_bias, bool has_mask) {
  std::vector<Case> cases = {
      {.name = "pairs", .seqlen_q = 150, .seqlen_k = 138},
      {.name = "causal pairs", .seqlen_q = 137, .seqlen_k = 150, .mask = causal()},
      {.name = "pairs, more queries", .seqlen_q = 70, .seqlen_k = 36, .mask = window(30, 9)},
      {.name = "pairs of groups", .heads_q = 6, .heads_kv = 2, .seqlen_k = 34},
      {.name = "pairs, large", .scale = 1.0f, .magnitude = 4.0f},
      {.name = "pairs of keys", .batch = 2, .bias_of = {true, false, false, true}},
      {.name = "two keys", .seqlen_q = 5, .seqlen_k = 2},
  };
  for (int i : {0, 3}) {
    Case c = cases[i];
    c.softcap = 1.5f;
    for (bool alibi : {false, true}) {
      c.name = std::string(alibi ? "ALiBi, " : "") + "softcap and " + cases[i].name;
      c.has_alibi = alibi;
      cases.push_back(c);
    }
  }
  for (Case& c : cases) {
    c.head_dim = head_dim;
    c.has_bias = c.has_short_bias = has_bias;
    c.has_mask = has_mask;
  }
  return cases;
}

template <class Kernel, class... Pairs>
void run_pairs() {
  constexpr bool kHasBias = (std::is_same_v<Pairs, PairBias> || ...);
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

// Biases of each kind of shape, and what else is between a bias and its gradient.
std::vector<Case> bias_cases(int head_dim) {
  std::vector<Case> cases = {
      {.name = "bias", .batch = 2, .seqlen_k = 137, .bias_of = {true, true, true, true}},
      {.name = "bias of heads", .batch = 3, .heads_q = 4, .heads_kv = 2, .mask = causal()},
      {.name = "bias of batch entries", .batch = 2, .bias_of = {true, false, true, true}},
      {.name = "bias of logits",
       .batch = 2,
       .softcap = 1.5f,
       .bias_of = {false, false, true, true}},
      {.name = "bias of keys", .batch = 2, .seqlen_k = 77, .bias_of = {true, false, false, true}},
      {.name = "bias of queries", .dropout = 0.3f, .bias_of = {false, true, true, false}},
      {.name = "bias of one", .dropout = 0.3f, .bias_of = {false, false, false, false}},
  };
  cases[3].dropout = 0.5f;
  cases[5].mask = window(19, 3);
  for (Case& c : cases) {
    c.has_bias = c.has_sinks = c.has_grad_lse = true;
    c.head_dim = head_dim;
  }
  return cases;
}

using Half = cutlass::half_t;
using BFloat = cutlass::bfloat16_t;

template <class Element, int... kTile>
using BiasGrad = sm80::Backward<Element, kTile..., true, VarlenSeqInfo, false, false, true>;

template <class Element, int... kTile>
using Masked = sm90::Backward<Element, kTile..., DenseSeqInfo, false, true>;
template <bool kHasMask, class Element, int... kTile>
using WgmmaDropout = sm90::Backward<Element, kTile..., DenseSeqInfo, false, kHasMask, true>;
template <bool kHasMask, class Element, int... kTile>
using WgmmaBiasGrad = sm90::Backward<Element, kTile..., DenseSeqInfo, false, kHasMask, false, true>;

// Masks by their map; the first three are for mutants.
std::vector<Case> mask_cases(int head_dim) {
  std::vector<Case> cases = {
      {.name = "mask of each head",
       .batch = 2,
       .heads_q = 4,
       .heads_kv = 2,
       .seqlen_q = 90,
       .seqlen_k = 211,
       .mask_of = {true, true, true, true}},
      {.name = "window, more tiles of queries than a word has",
       .heads_q = 1,
       .seqlen_q = 2090,
       .seqlen_k = 230,
       .mask = window(100, 0),
       .mask_of = {false, false, true, true},
       .sees = [](int, int, int i, int j) { return (i / 3 + j) % 5 != 0; }},
      {.name = "blocks of which all is seen, and others; queries and keys that see none",
       .batch = 2,
       .heads_q = 1,
       .seqlen_q = 270,
       .seqlen_k = 600,
       .mask_of = {true, false, true, true},
       .sees = [](int b, int, int i, int j) { return (b + i / 130 + j / 200) % 3 != 0; }},
      {.name = "padding",
       .batch = 2,
       .heads_q = 2,
       .seqlen_q = 140,
       .seqlen_k = 400,
       .mask_of = {true, false, false, true},
       .sees = [](int b, int, int, int j) { return b == 0 ? j < 197 : j >= 203; }},
      {.name = "all seen",
       .seqlen_q = 130,
       .seqlen_k = 390,
       .sees = [](int, int, int, int) { return true; }},
      {.name = "NaN in tiles that nobody sees",
       .batch = 2,
       .seqlen_q = 130,
       .seqlen_k = 600,
       .mask_of = {true, false, false, true},
       .sees = [](int, int, int, int j) { return j < 384; },
       .nan_keys = 216},
      {.name = "nothing seen", .sees = [](int, int, int, int) { return false; }},
      {.name = "heads that see nothing",
       .heads_q = 6,
       .heads_kv = 2,
       .seqlen_k = 200,
       .sees = [](int, int h, int, int) { return h % 3 == 1; }},
      {.name = "causal", .seqlen_q = 200, .seqlen_k = 230, .mask = causal()},
      {.name = "window", .seqlen_q = 300, .seqlen_k = 260, .mask = window(70, 30)},
      {.name = "one key",
       .seqlen_q = 5,
       .seqlen_k = 1,
       .sees = [](int, int, int i, int) { return i != 2; }},
      {.name = "more queries", .seqlen_q = 150, .seqlen_k = 37, .mask = causal()},
      {.name = "rows",
       .seqlen_q = 140,
       .seqlen_k = 70,
       .mask_of = {false, true, true, false},
       .sees = [](int, int h, int i, int) { return (i + h) % 5 != 0; }},
      {.name = "a number",
       .batch = 2,
       .seqlen_q = 70,
       .mask_of = {true, true, false, false},
       .sees = [](int b, int h, int, int) { return b != h; }},
      {.name = "chunks", .seqlen_q = 250, .seqlen_k = 250, .mask = causal()},
      {.name = "large logits", .seqlen_q = 90, .seqlen_k = 211, .scale = 1.0f, .magnitude = 4.0f},
  };
  cases[14].mask.attention_chunk = 90;
  for (Case& c : cases) {
    c.head_dim = head_dim;
    c.has_mask = true;
    c.has_sinks = c.seqlen_q < 100 && c.magnitude == 1.0f;
    c.has_grad_lse = c.batch == 2;
  }
  return cases;
}

template <class Kernel>
void run_masked() {
  for (Case const& c : mask_cases(Kernel::Config::kHeadDim)) run<Kernel, Score<MaskBits>>(c);
  Case narrow = mask_cases(Kernel::Config::kHeadDim - 24)[0];
  run<Kernel, Score<MaskBits>>(narrow);
}

// For mutants: what shows most in little time.
TEST(few) {
  using Both = sm80::Backward<Half, 64, 64, 128, 4>;
  using Roles = sm80::Backward<Half, 128, 32, 128, 8>;
  using General = sm80::Backward<Half, 64, 32, 128, 4, true>;
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
  run<BiasGrad<Half, 64, 32, 128, 4>, GeneralScore>(b);
  d.head_dim = 96;
  run<sm80::Backward<Half, 96, 64, 128, 8, false, DenseSeqInfo, false, true>, IdentityScore>(d);
  Case wide{.name = "wide", .heads_q = 1, .seqlen_q = 80, .seqlen_k = 70, .mask = causal()};
  wide.head_dim = 256;
  run<sm80::Backward<Half, 256, 32, 64, 8>, IdentityScore>(wide);
}
TEST(few_terms) {
  using Both = sm80::Backward<Half, 64, 64, 128, 4>;
  using Roles = sm80::Backward<Half, 128, 32, 128, 8>;
  Case c{.name = "ALiBi", .heads_q = 3, .seqlen_q = 100, .seqlen_k = 139, .has_alibi = true};
  run<Both, Score<Alibi>>(c);
  c.softcap = 1.5f, c.head_dim = 128, c.heads_q = 2, c.mask = causal();
  run<Roles, Score<Softcap, Alibi>>(c);
  Case b{.name = "pairs", .heads_q = 2, .seqlen_q = 70, .seqlen_k = 138, .has_bias = true};
  b.has_short_bias = b.has_mask = true, b.softcap = 1.5f;
  run<Both, Score<Softcap, PairBias, PairMask>>(b);
}
TEST(few_wgmma) {
  Case c{.name = "window", .heads_q = 1, .seqlen_q = 270, .seqlen_k = 210, .mask = window(150, 0)};
  run<sm90::Backward<Half, 64, 64, 192, 12>, IdentityScore>(c, simt::FiberOrder::kRandom);
  c.head_dim = 128, c.seqlen_k = 139;
  run<sm90::Backward<Half, 128, 64, 128, 8>, IdentityScore>(c, simt::FiberOrder::kRandom);
  using Ordered = sm90::Backward<Half, 64, 64, 192, 12, DenseSeqInfo, true>;
  c.head_dim = 64, c.seqlen_q = 150, c.seqlen_k = 400, c.mask = causal();
  run<Ordered, IdentityScore>(c);
  c.seqlen_k = 1000, c.mask = {};
  run<Ordered, IdentityScore>(c, simt::FiberOrder::kReverse, 16);
  Case packed{.name = "packed", .batch = 3, .heads_q = 1, .seqlen_q = 70, .seqlen_k = 80};
  packed.cu_seqlens_q = {0, 70, 70, 101}, packed.cu_seqlens_k = {0, 60, 63, 143};
  run<sm90::Backward<Half, 64, 64, 192, 12, VarlenSeqInfo>, IdentityScore>(packed);
}
TEST(few_mask) {
  std::vector<Case> const cases = mask_cases(64);
  for (int i : {0, 1, 2}) run<Masked<Half, 64, 64, 192, 12>, Score<MaskBits>>(cases[i]);
  for (Case c : {cases[0], cases[1]}) {
    c.head_dim = 128;
    run<Masked<Half, 128, 64, 128, 8>, Score<MaskBits>>(c, simt::FiberOrder::kRandom);
  }
}

template <class Element, int kHeadDim, int kHeadDimV, class SeqInfo = DenseSeqInfo>
using TwoPass = sm90::BackwardTwoPass<Element, kHeadDim, kHeadDimV, 64, 64, 8, SeqInfo>;

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
  run<TwoPass<Half, 64, 64, VarlenSeqInfo>, IdentityScore>(packed);
}

// And without one: roles that hand over, and blocks that wait for each other.
TEST(races) {
  Case c{.name = "causal groups", .seqlen_q = 90, .seqlen_k = 139, .mask = causal()};
  run<sm80::Backward<Half, 64, 64, 128, 4, false, DenseSeqInfo, true>, IdentityScore>(c);
  c.head_dim = 96;
  run<sm80::Backward<Half, 96, 64, 128, 8>, IdentityScore>(c);
  c.head_dim = 128;
  run<sm80::Backward<BFloat, 128, 64, 128, 8>, IdentityScore>(c);
  run<sm80::Backward<Half, 128, 32, 128, 8, false, DenseSeqInfo, true>, IdentityScore>(c);
  run<BiasGrad<BFloat, 128, 32, 64, 8>, GeneralScore>(bias_cases(128)[3]);
  c.head_dim = 64, c.has_bias = c.has_mask = true;
  run<sm80::Backward<Half, 64, 32, 128, 4, true, VarlenSeqInfo, true>, GeneralScore>(c);
}

TEST(dropout) {
  run_dropout<sm80::Backward<Half, 64, 64, 128, 4, false, DenseSeqInfo, false, true>>();
  run_dropout<sm80::Backward<BFloat, 128, 32, 128, 8, false, DenseSeqInfo, false, true>>();
  run_dropout<sm80::Backward<BFloat, 128, 64, 128, 8, false, DenseSeqInfo, false, true>>();
  run_dropout<sm80::Backward<Half, 256, 32, 64, 8, false, DenseSeqInfo, false, true>>();
}

TEST(few_wgmma_terms) {
  Case c{.name = "ALiBi", .heads_q = 3, .seqlen_q = 100, .seqlen_k = 139, .has_alibi = true};
  run<sm90::Backward<Half, 64, 64, 192, 12>, Score<Alibi>>(c);
  c.softcap = 1.5f, c.head_dim = 128, c.heads_q = 2, c.mask = causal();
  run<sm90::Backward<Half, 128, 64, 128, 8>, Score<Softcap, Alibi>>(c);
  c.has_alibi = false;
  run<sm90::Backward<Half, 128, 64, 128, 8>, SoftcapScore>(c, simt::FiberOrder::kRandom);
  Case b{.name = "bias", .heads_q = 2, .seqlen_q = 70, .seqlen_k = 138, .has_bias = true};
  b.has_short_bias = true, b.softcap = 1.5f, b.mask = causal();
  run<sm90::Backward<Half, 64, 64, 192, 12>, Score<Softcap, PairBias>,
      Score<Softcap, Alibi, PairBias>>(b);
  Case m = mask_cases(64)[0];
  m.has_alibi = true, m.softcap = 1.5f, m.has_sinks = false;
  run<Masked<Half, 64, 64, 192, 12>, Score<Softcap, Alibi, MaskBits>>(m);
}
TEST(few_wgmma_dropout) {
  Case c{.name = "dropout", .heads_q = 2, .seqlen_q = 90, .seqlen_k = 210, .dropout = 0.3f};
  c.mask = causal(), c.has_grad_lse = true;
  run<WgmmaDropout<false, Half, 64, 64, 192, 12>, IdentityScore>(c);
  c.head_dim = 128, c.seqlen_k = 139;
  run<WgmmaDropout<false, Half, 128, 64, 128, 8>, IdentityScore>(c, simt::FiberOrder::kRandom);
  Case m = mask_cases(64)[0];
  m.dropout = 0.3f;
  run<WgmmaDropout<true, Half, 64, 64, 192, 12>, Score<MaskBits>>(m);
}
TEST(few_wgmma_bias_grad) {
  Case c{.name = "bias", .batch = 2, .heads_q = 2, .seqlen_q = 90, .seqlen_k = 210};
  c.has_bias = c.has_short_bias = true, c.mask = causal();
  run<WgmmaBiasGrad<false, Half, 64, 64, 192, 12>, Score<PairBias>>(c);
  c.bias_of = {true, true, true, true};
  run<WgmmaBiasGrad<false, Half, 64, 64, 192, 12>, Score<PairBias>>(c);
  c.bias_of = {true, false, false, true}, c.has_mask = true, c.mask_of = {true, false, false, true};
  run<WgmmaBiasGrad<true, Half, 64, 64, 192, 12>, Score<MaskBits, PairBias>>(c);
}

TEST(one_role) {
  run_common<sm80::Backward<Half, 64, 64, 128, 4>>();
  run_common<sm80::Backward<BFloat, 64, 64, 128, 8>>();
}

TEST(two_roles) {
  run_common<sm80::Backward<BFloat, 128, 64, 128, 8>>();
  run_common<sm80::Backward<Half, 128, 32, 128, 8>>();
  run_common<sm80::Backward<Half, 96, 64, 128, 8>>();
}

TEST(wide_heads) {
  run_common<sm80::Backward<Half, 256, 32, 64, 8>>();
  run_common<sm80::Backward<Half, 256, 64, 64, 8>>();
  run_common<sm80::Backward<Half, 192, 32, 64, 8>>();
}

TEST(wgmma) {
  run_plain<sm90::Backward<Half, 64, 64, 192, 12>, IdentityScore>();
  run_plain<sm90::Backward<BFloat, 128, 64, 128, 8>, IdentityScore>();
  run_plain<sm90::Backward<BFloat, 64, 64, 192, 12, DenseSeqInfo, true>, IdentityScore>();
  run_plain<sm90::Backward<Half, 128, 64, 128, 8, DenseSeqInfo, true>, IdentityScore>();
}

template <class Kernel>
void run_softcap() {
  for (Case c : common_cases(Kernel::Config::kHeadDim, Kernel::Config::kBlockN)) {
    c.softcap = c.magnitude > 1.0f ? 30.0f : 1.5f;
    run<Kernel, SoftcapScore>(c);
  }
}
TEST(wgmma_softcap) {
  run_softcap<sm90::Backward<Half, 64, 64, 192, 12>>();
  run_softcap<sm90::Backward<BFloat, 128, 64, 128, 8>>();
}

TEST(wgmma_mask) {
  run_masked<Masked<Half, 64, 64, 192, 12>>();
  run_masked<Masked<BFloat, 128, 64, 128, 8>>();
}

template <class Kernel, class... Terms>
void run_masked_terms() {
  for (Case c : mask_cases(Kernel::Config::kHeadDim)) {
    if (c.seqlen_q > 1000) continue;
    c.has_alibi = (std::is_same_v<Terms, Alibi> || ...);
    c.has_bias = c.has_short_bias = (std::is_same_v<Terms, PairBias> || ...);
    if (c.has_bias && c.seqlen_k % 2 != 0) ++c.seqlen_k;
    if ((std::is_same_v<Terms, Softcap> || ...)) c.softcap = c.magnitude > 1.0f ? 30.0f : 1.5f;
    run<Kernel, Score<Terms...>>(c);
  }
}
TEST(wgmma_mask_terms) {
  run_masked_terms<Masked<Half, 64, 64, 192, 12>, Softcap, MaskBits>();
  run_masked_terms<Masked<BFloat, 128, 64, 128, 8>, Alibi, MaskBits>();
  run_masked_terms<Masked<Half, 64, 64, 192, 12>, MaskBits, PairBias>();
}

TEST(wgmma_dropout) {
  run_dropout<WgmmaDropout<false, Half, 64, 64, 192, 12>>();
  run_dropout<WgmmaDropout<false, BFloat, 128, 64, 128, 8>>();
  for (Case c : mask_cases(64)) {
    if (c.seqlen_q > 1000 || c.magnitude > 1.0f) continue;
    c.dropout = 0.3f;
    run<WgmmaDropout<true, Half, 64, 64, 192, 12>, Score<MaskBits>>(c);
  }
}

// Biases that are read for two keys at a time, of each kind of shape.
template <class Kernel, class Score>
void run_bias_grad(bool has_mask) {
  for (Case c : bias_cases(Kernel::Config::kHeadDim)) {
    if (!c.bias_of[3]) continue;
    c.softcap = c.dropout = 0.0f;
    c.has_short_bias = true, c.has_mask = has_mask;
    c.seqlen_k += c.seqlen_k % 2;
    run<Kernel, Score>(c);
  }
}
TEST(wgmma_bias_grad) {
  run_bias_grad<WgmmaBiasGrad<false, Half, 64, 64, 192, 12>, Score<PairBias>>(false);
  run_bias_grad<WgmmaBiasGrad<false, BFloat, 128, 64, 128, 8>, Score<PairBias>>(false);
  run_bias_grad<WgmmaBiasGrad<true, Half, 64, 64, 192, 12>, Score<MaskBits, PairBias>>(true);
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

TEST(alibi_one_role) { run_alibi<sm80::Backward<Half, 64, 64, 128, 4>>(); }

TEST(wgmma_alibi) {
  run_alibi<sm90::Backward<BFloat, 64, 64, 192, 12>>();
  run_alibi<sm90::Backward<Half, 128, 64, 128, 8>>();
}

TEST(wgmma_bias) {
  run_pairs<sm90::Backward<Half, 64, 64, 192, 12>, PairBias>();
  run_pairs<sm90::Backward<BFloat, 128, 64, 128, 8>, PairBias>();
}

TEST(alibi_two_roles) {
  run_alibi<sm80::Backward<BFloat, 128, 32, 128, 8>>();
  run_alibi<sm80::Backward<Half, 256, 32, 64, 8>>();
}

TEST(pairs_one_role) {
  using Kernel = sm80::Backward<Half, 64, 64, 128, 4>;
  run_pairs<Kernel, PairBias>();
  run_pairs<Kernel, PairBias, PairMask>();
}

TEST(pairs_two_roles) {
  run_pairs<sm80::Backward<BFloat, 128, 32, 64, 8>, PairBias>();
  run_pairs<sm80::Backward<Half, 128, 64, 128, 8>, PairMask>();
}

TEST(general_one_role) { run_general<sm80::Backward<Half, 64, 32, 128, 4, true>>(); }

TEST(general_two_roles) {
  run_general<sm80::Backward<BFloat, 128, 32, 64, 8, true>>();
  run_general<sm80::Backward<Half, 256, 16, 64, 8, true>>();
}

TEST(bias_one_role) {
  using Kernel = BiasGrad<Half, 64, 32, 128, 4>;
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
  for (int i : {1, 3}) run<BiasGrad<BFloat, 128, 32, 64, 8>, GeneralScore>(cases[i]);
}

TEST(in_order) {
  run_common<sm80::Backward<Half, 64, 64, 128, 4, false, DenseSeqInfo, true>>();
  run_common<sm80::Backward<Half, 128, 32, 128, 8, false, DenseSeqInfo, true>>();
  run_plain<sm80::Backward<Half, 256, 32, 64, 8, false, DenseSeqInfo, true>, IdentityScore>();
  run_general<sm80::Backward<Half, 64, 32, 128, 4, true, VarlenSeqInfo, true>>();
  run_alibi<sm80::Backward<Half, 64, 64, 128, 4, false, DenseSeqInfo, true>>();
}

TEST(packed_sequences) {
  using Kernel = sm80::Backward<Half, 64, 64, 128, 4, false, VarlenSeqInfo>;
  using Roles = sm80::Backward<Half, 128, 32, 128, 8, false, VarlenSeqInfo>;
  using General = sm80::Backward<Half, 64, 32, 128, 4, true, VarlenSeqInfo>;
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
  run<sm90::Backward<BFloat, 64, 64, 192, 12, VarlenSeqInfo>, IdentityScore>(c);
  c.head_dim = 128;
  run<Roles, IdentityScore>(c);
  run<sm90::Backward<Half, 128, 64, 128, 8, VarlenSeqInfo>, IdentityScore>(c);
  c.head_dim = 256;
  run<TwoPass<Half, 256, 256, VarlenSeqInfo>, IdentityScore>(c);
  c.head_dim = 192, c.head_dim_v = 128;
  run<TwoPass<BFloat, 192, 128, VarlenSeqInfo>, IdentityScore>(c);
  Case dense{.name = "dense in a varlen kernel", .batch = 2, .mask = causal()};
  run<Kernel, IdentityScore>(dense);
  run<sm90::Backward<Half, 64, 64, 192, 12, VarlenSeqInfo>, IdentityScore>(dense);
  run<TwoPass<Half, 64, 64, VarlenSeqInfo>, IdentityScore>(dense);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
