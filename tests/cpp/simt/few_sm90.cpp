// The wgmma forward kernels on few cases, for mutants and for the race detector: sequences of
// different lengths with two stages of Q, other calls with one; keys in pages; a bias; blocks that
// share keys.
#include <utility>
#include <vector>

#include "simt/split_keys_case.hpp"
#include "simt/test_first.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using cutlass::bfloat16_t;
using cutlass::half_t;

namespace {

using Accumulators = with::Accumulators<int32_t, half_t>;  // of int8 and of e4m3 products

using Large = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>, with::PackedRows>;

Case of(char const* name, int head_dim, int seqlen_q, int seqlen_k) {
  Case what;
  what.name = name;
  what.head_dim = head_dim, what.seqlen_q = seqlen_q, what.seqlen_k = seqlen_k;
  what.layout = attention_case::Layout::kTransposed;
  return what;
}

TEST(few) {
  Case causal = of("causal, several tiles of a block", 64, 400, 530);
  causal.causal = true;
  Case window = of("window, warpgroups of other keys than each other", 64, 400, 700);
  window.window_left = 500, window.window_right = 0, window.magnitude = 40;
  Case packed = of("packed heads, rows without keys", 64, 50, 40);
  packed.num_heads_q = 8, packed.num_heads_kv = 2, packed.causal = packed.sinks = true;
  Case chunks = of("chunks, several in a tile of rows", 64, 300, 430);
  chunks.attention_chunk = 150;
  Case alibi = of("ALiBi, slopes per batch, keys right of the diagonal", 64, 150, 300);
  alibi.num_heads_q = 8, alibi.num_heads_kv = alibi.batch = 2, alibi.alibi = "bh";
  Case to_the_left = of("ALiBi, causal, softcap, large scores", 64, 200, 330);
  to_the_left.alibi = "h", to_the_left.causal = true, to_the_left.softcap = 30;
  to_the_left.magnitude = 40;
  Case capped = of("softcap, logits around it in some warps", 64, 100, 300);
  capped.softcap = 30, capped.magnitude = 5.5;
  Case all_capped = capped;
  all_capped.name = "softcap, logits around it in all warps";
  all_capped.softcap = 3, all_capped.magnitude = 4;
  Case without_rows = of("a warpgroup without rows", 64, 40, 900);
  std::vector<Case> const cases{causal,      window, packed,     chunks,      alibi,
                                to_the_left, capped, all_capped, without_rows};
  int runs = 0;
  for (Case const& what : test_first::sorted(cases)) {
    sm90_case::check_case<Large>(what, DType::kFloat16, runs);
  }
  CHECK_EQ(runs, 9);
}

TEST(few_wide) {
  using Tight = sm90::Forward<bfloat16_t, TileShape<256, 256, 128, 64, 8>>;
  int runs = 0;
  Case tight = of("two tiles of a block, large scores", 256, 130, 440);
  tight.magnitude = 40;
  sm90_case::check_case<Tight>(tight, DType::kBFloat16, runs);
  Case few_keys =
      of("tiles of a block with few keys, which are copied while O is stored", 256, 500, 60);
  few_keys.num_heads_q = few_keys.num_heads_kv = 2;
  sm90_case::check_case<Tight>(few_keys, DType::kBFloat16, runs);
  CHECK_EQ(runs, 2);
}

TEST(few_sequences) {
  int runs = 0;
  std::vector<Case> sequences;
  for (auto const& [queries, keys] : {std::pair(200, 140), std::pair(20, 0), std::pair(70, 300)}) {
    sequences.push_back(of("sequences", 64, queries, keys));
    sequences.back().causal = true;
    sequences.back().seed = unsigned(queries);
  }
  sm90_case::check_packed<Large>(sequences, DType::kFloat16, 5, runs);
  CHECK_EQ(runs, 1);
}

TEST(few_pages) {
  using Kernel = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>, with::Pages>;
  int runs = 0;
  std::vector<Case> sequences;
  for (auto const& [queries, keys] : {std::pair(200, 140), std::pair(20, 0), std::pair(70, 300)}) {
    sequences.push_back(of("sequences", 64, queries, keys));
    sequences.back().causal = true, sequences.back().num_heads_q = 2;
    sequences.back().seed = unsigned(queries);
  }
  for (int const size : {16, 48, 256}) {
    sm90_case::check_pages<Kernel>(sequences, DType::kFloat16, {size, 0, true}, runs);
  }
  for (Case& what : sequences) what.window_left = 150;
  sm90_case::check_pages<Kernel>(sequences, DType::kFloat16, {64}, runs);
  CHECK_EQ(runs, 4);
}

TEST(few_bias) {
  using Kernel = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>, with::Bias>;
  int runs = 0;
  Case shared = of("bias that batch entries share", 64, 200, 264);
  shared.bias = "hqk", shared.batch = shared.num_heads_q = shared.num_heads_kv = 2;
  shared.magnitude = 40;
  Case packed = of("bias, packed heads", 64, 20, 400);
  packed.bias = "bhqk", packed.num_heads_q = 8, packed.num_heads_kv = packed.batch = 2;
  Case of_keys = of("bias that queries share", 64, 130, 200);
  of_keys.bias = "bhk", of_keys.batch = of_keys.num_heads_q = of_keys.num_heads_kv = 2;
  Case others = of("bias, softcap, ALiBi, chunks, grouped heads", 64, 150, 264);
  others.bias = "hqk", others.alibi = "h", others.softcap = 3, others.attention_chunk = 100;
  others.num_heads_q = others.num_heads_kv = 2;
  for (Case what : {shared, packed, of_keys, others}) {
    what.layout = attention_case::Layout::kContiguous;
    sm90_case::check_case<Kernel>(what, DType::kFloat16, runs);
  }
  CHECK_EQ(runs, 4);
}

TEST(few_max_logit) {
  using Kernel = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>>;
  using Scores =
      sm90_case::ScoreList<Score<MaxLogit>, Score<Softcap, MaxLogit>, Score<Alibi, MaxLogit>>;
  int runs = 0;
  std::vector<Case> list = attention_case::few_max_logit_cases(64);
  list.push_back(list[0]);
  list.back().name = "largest logits, ALiBi", list.back().alibi = "h";
  for (Case& what : list) {
    what.layout = attention_case::Layout::kTransposed;
    std::vector<attention_case::SolvedCase> cases{{what, DType::kFloat16}};
    Problem const problem = cases[0].call();
    sm90_case::check_calls(
        what.name, cases,
        [&](int num_sms) { return sm90_case::launch<Kernel>(problem, num_sms, Scores{}); }, runs);
  }
  CHECK_EQ(runs, 5);
}

TEST(few_mask) {
  using Kernel = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>, with::Mask>;
  using Narrow = sm90::Forward<bfloat16_t, TileShape<192, 192, 128, 96, 8>, with::Mask>;
  using Bias = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>, with::Bias, with::Mask>;
  int runs = 0;
  Case shared = of("mask of all heads and entries, rows without keys, ragged", 64, 200, 333);
  shared.mask = "qk", shared.batch = shared.num_heads_q = shared.num_heads_kv = 2;
  shared.magnitude = 40;
  Case padding = of("padding, packed heads, causal", 64, 50, 400);
  padding.mask = "bk", padding.num_heads_q = 8, padding.num_heads_kv = padding.batch = 2;
  padding.causal = true, padding.layout = attention_case::Layout::kContiguous;
  Case own = of("mask of each head, packed heads", 64, 40, 256);
  own.mask = "bhqk", own.num_heads_q = 8, own.num_heads_kv = own.batch = 2;
  own.layout = attention_case::Layout::kContiguous;
  Case blocks = of("tiles of which all, some, or no keys are seen", 64, 300, 650);
  blocks.mask = "bqk", blocks.mask_block = 200, blocks.batch = 2, blocks.magnitude = 40;
  Case corner = of("three rows that see a tile of keys; an entry without keys", 64, 128, 131);
  corner.mask = "bqk", corner.mask_block = 1000, corner.batch = 2, corner.causal = true;
  Case slopes = of("the same with ALiBi, whose logits rise", 64, 300, 650);
  slopes.mask = "qk", slopes.mask_block = 200, slopes.alibi = "h", slopes.magnitude = 40;
  Case many = of("33 tiles of keys, window: words of the map without tiles", 64, 130, 4200);
  many.mask = "qk", many.window_left = 150, many.window_right = 100;
  Case terms = of("mask, softcap, ALiBi to both sides, chunks", 64, 150, 264);
  terms.mask = "hqk", terms.alibi = "h", terms.softcap = 3, terms.attention_chunk = 100;
  terms.num_heads_q = terms.num_heads_kv = 2;
  std::vector<Case> const cases{shared, padding, own, blocks, corner, slopes, many, terms};
  for (Case const& what : test_first::sorted(cases)) {
    sm90_case::check_case<Kernel>(what, DType::kFloat16, runs);
  }
  Case narrow = of("tiles of 96 keys", 192, 140, 400);
  narrow.mask = "qk", narrow.layout = attention_case::Layout::kContiguous;
  sm90_case::check_case<Narrow>(narrow, DType::kBFloat16, runs);
  terms.bias = "hqk", terms.mask = "bhk";
  terms.layout = attention_case::Layout::kContiguous;
  sm90_case::check_case<Bias>(terms, DType::kFloat16, runs);
  CHECK_EQ(runs, 10);
}

TEST(few_dropout) {
  using Plain = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>, with::Dropout>;
  using Masked = sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>, with::Mask, with::Dropout>;
  int runs = 0;
  for (Case what : attention_case::few_dropout_cases(64)) {
    what.layout = attention_case::Layout::kTransposed;
    sm90_case::check_case<Plain>(what, DType::kFloat16, runs);
  }
  Case all = of("dropout, several tiles of keys, softcap, ALiBi, chunks", 64, 200, 333);
  all.dropout_p = 0.3f, all.alibi = "h", all.softcap = 3, all.attention_chunk = 150;
  all.num_heads_q = all.num_heads_kv = 2;
  sm90_case::check_case<Plain>(all, DType::kFloat16, runs);
  Case mask = of("dropout beside a mask", 64, 200, 333);
  mask.dropout_p = 0.3f, mask.mask = "qk", mask.num_heads_q = mask.num_heads_kv = 2;
  sm90_case::check_case<Masked>(mask, DType::kFloat16, runs);
  CHECK_EQ(runs, 5);
}

// In 8 bits: Q in registers, and beyond a head dim of 128 in shared memory.
TEST(few_quantized) {
  using Kernel = sm90::QuantizedForward<half_t, TileShape<64, 64, 128, 128, 8>, Accumulators>;
  using Wide = sm90::QuantizedForward<bfloat16_t, TileShape<256, 256, 64, 128, 4>, Accumulators>;
  int runs = 0;
  Case causal = of("causal, an odd number of key blocks, grouped heads", 64, 300, 530);
  causal.causal = causal.sinks = true, causal.num_heads_q = 4, causal.num_heads_kv = 2;
  Case window = of("window, warpgroups of other keys than each other", 64, 200, 900);
  window.window_left = 500, window.window_right = 0, window.magnitude = 40;
  Case none = of("rows without keys", 64, 200, 60);
  none.causal = true;
  Case others = of("ALiBi, softcap, chunks", 64, 150, 264);
  others.alibi = "h", others.softcap = 3, others.attention_chunk = 100;
  for (Case what : {causal, window, none, others}) {
    what.quantize = Quantize::kFp8;
    sm90_case::check_case<Kernel>(what, DType::kFloat16, runs);
  }
  Case wide = of("four rounds of columns, large scores", 256, 130, 440);
  wide.magnitude = 40, wide.quantize = Quantize::kFp8;
  sm90_case::check_case<Wide>(wide, DType::kBFloat16, runs);
  CHECK_EQ(runs, 5);
}

TEST(few_split_keys) {
  using Kernel = sm90::SplitKeys<half_t, TileShape<64, 64, 64, 128, 8>>;
  int runs = 0;
  Case rounds = of("buffers used again, packed heads", 64, 9, 620);
  rounds.num_heads_q = 8, rounds.num_heads_kv = 2, rounds.causal = rounds.sinks = true;
  split_keys_case::check<Kernel>(rounds, DType::kFloat16, 1, runs);
  Case shared = of("three rounds of some, large scores", 64, 90, 1300);
  shared.causal = true, shared.magnitude = 40;
  split_keys_case::check<Kernel>(shared, DType::kFloat16, 2, runs);
  Case none = of("blocks without keys", 64, 40, 600);
  none.window_left = 300;
  split_keys_case::check<Kernel>(none, DType::kFloat16, 4, runs);
  Case pass = of("two tiles of each warpgroup", 64, 40, 500);
  pass.causal = true;
  split_keys_case::check<Kernel>(pass, DType::kFloat16, 1, runs);
  CHECK_EQ(runs, 4);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
