// The wgmma forward kernel on the engine: right against fp64, in every order of its threads and for
// any number of tiles per block.
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "simt/async.hpp"
#include "simt/sm90_case.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::SolvedCase;
using cutlass::bfloat16_t;
using cutlass::half_t;
using sm90_case::check_case;

namespace {

std::vector<Case> cases(int head_dim, int head_dim_v = 0) {
  std::vector<Case> list = sm90_case::dense_cases();
  Case& last = list.emplace_back();
  last.name = "ALiBi, softcap, chunks, from another diagonal", last.seqlen_q = 270;
  last.seqlen_k = 500, last.alibi = "h", last.softcap = 3;
  last.attention_chunk = 300, last.diagonal_shift = -40, last.magnitude = 40;
  return sm90_case::with_head_dims(list, head_dim, head_dim_v);
}

template <class Kernel>
void check_cases(DType dtype, int head_dim, int head_dim_v = 0) {
  int runs = 0;
  for (Case const& what : cases(head_dim, head_dim_v)) check_case<Kernel>(what, dtype, runs);
  CHECK_EQ(runs, int(cases(head_dim).size()));
}

TEST(dropout) {
  using Wide = sm90::Forward<bfloat16_t, TileShape<128, 128, 128, 128, 8>, with::Dropout>;
  int runs = 0;
  for (Case what : attention_case::few_dropout_cases(128)) {
    what.layout = attention_case::Layout::kTransposed;
    sm90_case::check_case<Wide>(what, DType::kBFloat16, runs);
  }
  CHECK_EQ(runs, 3);
}
TEST(head_dim_64) {
  check_cases<sm90::Forward<half_t, TileShape<64, 64, 192, 128, 12>>>(DType::kFloat16, 64);
}
TEST(head_dim_64_two_warpgroups) {
  check_cases<sm90::Forward<half_t, TileShape<64, 64, 128, 128, 8>>>(DType::kFloat16, 64);
}
TEST(head_dim_128) {
  check_cases<sm90::Forward<bfloat16_t, TileShape<128, 128, 128, 128, 8>>>(DType::kBFloat16, 128);
}
TEST(head_dim_256) {
  check_cases<sm90::Forward<half_t, TileShape<256, 256, 128, 64, 8>>>(DType::kFloat16, 256);
}
// V has another head dim than Q and K, and both are less than the tile's.
TEST(head_dims_192_128) {
  check_cases<sm90::Forward<half_t, TileShape<192, 128, 128, 128, 8>>>(DType::kFloat16, 168, 120);
}
TEST(library_cases) {
  int runs = 0;
  for (Case const& what : attention_case::few_cases(128)) {
    check_case<sm90::Forward<half_t, TileShape<128, 128, 128, 128, 8>>>(what, DType::kFloat16,
                                                                        runs);
  }
  CHECK(runs >= 3);
}

// With a bias. Batch entries, heads or queries may share entries.
std::vector<Case> bias_cases(int head_dim) {
  std::vector<Case> list(11);
  list[0].name = "bias of every logit", list[0].bias = "bhqk", list[0].seqlen_q = 200;
  list[0].seqlen_k = 328, list[0].batch = 2, list[0].num_heads_q = list[0].num_heads_kv = 2;
  list[1].name = "bias that batch entries share", list[1].bias = "hqk", list[1].seqlen_q = 260;
  list[1].seqlen_k = 264, list[1].batch = 3, list[1].num_heads_q = list[1].num_heads_kv = 2;
  list[1].causal = true;
  list[2].name = "bias that heads share, grouped heads", list[2].bias = "bqk";
  list[2].seqlen_q = 130, list[2].seqlen_k = 136, list[2].batch = 2, list[2].num_heads_q = 4;
  list[2].num_heads_kv = 2, list[2].window_left = 50, list[2].window_right = 9;
  list[3].name = "bias that queries share", list[3].bias = "bk", list[3].seqlen_q = 70;
  list[3].seqlen_k = 400, list[3].batch = 2, list[3].sinks = true;
  list[4].name = "bias, packed heads", list[4].bias = "bhqk", list[4].seqlen_q = 5;
  list[4].seqlen_k = 208, list[4].num_heads_q = 8, list[4].num_heads_kv = 2, list[4].batch = 2;
  list[5].name = "bias that packed heads share", list[5].bias = "qk", list[5].seqlen_q = 7;
  list[5].seqlen_k = 160, list[5].num_heads_q = 4, list[5].causal = true;
  list[6].name = "bias, large scores", list[6].bias = "qk", list[6].seqlen_q = 128;
  list[6].seqlen_k = 512, list[6].magnitude = 40;
  list[7].name = "bias, rows without keys", list[7].bias = "hqk", list[7].seqlen_q = 300;
  list[7].seqlen_k = 104, list[7].causal = true;
  list[8].name = "bias, negative scale", list[8].bias = "qk", list[8].seqlen_q = 100;
  list[8].seqlen_k = 296, list[8].softmax_scale = -0.3f;
  list[9].name = "bias of heads that queries share, packed heads", list[9].bias = "hk";
  list[9].seqlen_q = 6, list[9].seqlen_k = 152, list[9].num_heads_q = 4;
  list[10].name = "bias that queries and packed heads share", list[10].bias = "bk";
  list[10].seqlen_q = 40, list[10].seqlen_k = 280, list[10].num_heads_q = 4, list[10].batch = 2;
  list[10].causal = true;
  for (Case& what : list) {
    what.head_dim = head_dim, what.layout = attention_case::Layout::kContiguous;
  }
  return list;
}
template <class Element, int kHeadDim, int kBlockM, int kBlockN, int kWarps>
void check_bias(DType dtype, int head_dim) {
  using Kernel =
      sm90::Forward<Element, TileShape<kHeadDim, kHeadDim, kBlockM, kBlockN, kWarps>, with::Bias>;
  int runs = 0;
  for (Case const& what : bias_cases(head_dim)) check_case<Kernel>(what, dtype, runs);
  CHECK_EQ(runs, int(bias_cases(head_dim).size()));
}
TEST(bias_of_64) { check_bias<half_t, 64, 128, 128, 8>(DType::kFloat16, 64); }
TEST(bias_of_128) { check_bias<bfloat16_t, 128, 128, 128, 8>(DType::kBFloat16, 120); }
TEST(bias_of_256) { check_bias<half_t, 256, 128, 64, 8>(DType::kFloat16, 256); }

// Sequences of different lengths, one without queries, one without keys; some with NaN after the
// last key.
std::vector<Case> sequences(int head_dim, int head_dim_v = 0) {
  std::vector<Case> list;
  int const lengths[][2] = {{200, 333}, {1, 130}, {70, 0},   {129, 128},
                            {33, 450},  {0, 60},  {140, 140}};
  for (auto const& [queries, keys] : lengths) {
    Case what;
    what.name = "sequences of their own lengths", what.seqlen_q = queries, what.seqlen_k = keys;
    what.head_dim = head_dim, what.head_dim_v = head_dim_v;
    what.seed = unsigned(10 * list.size() + 1);
    list.push_back(what);
  }
  return list;
}
template <class Kernel>
void check_sequences(DType dtype, int head_dim, int head_dim_v = 0) {
  int runs = 0;
  auto const check = [&](int gap, auto const& change) {
    std::vector<Case> list = sequences(head_dim, head_dim_v);
    for (Case& what : list) change(what);
    sm90_case::check_packed<Kernel>(list, dtype, gap, runs);
  };
  check(0, [](Case&) {});
  check(5, [](Case& what) { what.causal = what.sinks = true, what.num_heads_q = 2; });
  check(3, [](Case& what) {
    what.name = "packed heads", what.num_heads_q = 8, what.num_heads_kv = 2;
    what.seqlen_q = what.seqlen_q % 7, what.window_left = 100, what.window_right = 3;
  });
  check(1, [](Case& what) { what.name = "chunks", what.attention_chunk = 90; });
  CHECK_EQ(runs, 4);
}
template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps>
using Varlen = sm90::Forward<Element, TileShape<kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps>,
                             with::PackedRows>;

TEST(packed_of_64) { check_sequences<Varlen<half_t, 64, 64, 192, 128, 12>>(DType::kFloat16, 64); }
TEST(packed_of_192_128) {
  check_sequences<Varlen<half_t, 192, 128, 128, 128, 8>>(DType::kFloat16, 168, 120);
}
// Also dense calls, and entries with ignored keys, which are NaN.
TEST(dense_of_packed) {
  using Kernel = Varlen<half_t, 64, 64, 192, 128, 12>;
  int runs = 0;
  for (Case const& what : attention_case::few_cases(64)) {
    check_case<Kernel>(what, DType::kFloat16, runs);
  }
  CHECK(runs >= 3);
  Case what;
  what.name = "keys that do not count", what.seqlen_q = 90, what.seqlen_k = 150;
  what.batch = 3, what.num_heads_q = what.num_heads_kv = 2, what.causal = true;
  std::vector<SolvedCase> cases{SolvedCase(what, DType::kFloat16)};
  constexpr int kLeft = 2;
  std::vector<int32_t> const used(3, kLeft + what.seqlen_k), left(3, kLeft);
  Problem problem = cases[0].call();
  problem.seq_k.seqlen += kLeft + 3;
  problem.seq_k.seqused = used.data(), problem.seq_k.leftpad = left.data();
  for (auto* t : {&problem.k, &problem.v}) {
    t->data = static_cast<half_t*>(t->data) - kLeft * t->row_stride;
  }
  auto const run = [&](int num_sms) { return sm90_case::launch<Kernel>(problem, num_sms); };
  runs = 0;
  sm90_case::check_calls(what.name, cases, run, runs);
  CHECK_EQ(runs, 1);
}

// In pages: a tile of keys has several pages, one, a part of one, or parts of several.
template <class Kernel>
void check_pages(DType dtype, int head_dim, int head_dim_v = 0) {
  int runs = 0;
  auto const check = [&](packed::PageLayout layout, auto const& change) {
    std::vector<Case> list = sequences(head_dim, head_dim_v);
    for (Case& what : list) change(what);
    sm90_case::check_pages<Kernel>(list, dtype, layout, runs);
  };
  auto const causal = [](Case& what) {
    what.causal = what.sinks = true, what.num_heads_q = 4, what.num_heads_kv = 2;
  };
  for (int const size : {8, 16, 64, 128, 256, 384, 24, 48}) check({size}, causal);
  check({16, 0, true}, causal);
  check({256, 8, true}, [](Case& what) { what.num_heads_q = 2; });
  for (int const size : {16, 64, 256}) {
    check({size, 0, true}, [](Case& what) {
      what.name = "window, packed heads", what.num_heads_q = 8, what.num_heads_kv = 2;
      what.seqlen_q = what.seqlen_q % 7, what.window_left = 200, what.window_right = 3;
    });
  }
  check({16}, [](Case& what) { what.name = "chunks", what.attention_chunk = 90; });
  check({48}, [](Case& what) {
    what.name = "softcap, window", what.softcap = 3, what.window_left = 70, what.causal = true;
  });
  CHECK_EQ(runs, 15);
}
template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps>
using Paged =
    sm90::Forward<Element, TileShape<kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps>, with::Pages>;

TEST(pages_of_64) { check_pages<Paged<half_t, 64, 64, 192, 128, 12>>(DType::kFloat16, 64); }
TEST(pages_of_128) { check_pages<Paged<bfloat16_t, 128, 128, 128, 128, 8>>(DType::kBFloat16, 128); }
TEST(pages_of_192_128) {
  check_pages<Paged<half_t, 192, 128, 128, 128, 8>>(DType::kFloat16, 168, 120);
}
TEST(pages_of_256) { check_pages<Paged<half_t, 256, 256, 128, 64, 8>>(DType::kFloat16, 256); }
// Without packed queries: entries of equal lengths.
TEST(pages_of_dense_queries) {
  int runs = 0;
  Case what;
  what.name = "prefill of a batch", what.seqlen_q = 90, what.seqlen_k = 333;
  what.batch = 3, what.num_heads_q = 4, what.num_heads_kv = 2, what.causal = true;
  what.head_dim = 128, what.alibi = "bh", what.window_left = 120;
  std::vector<SolvedCase> cases{SolvedCase(what, DType::kBFloat16)};
  packed::Paged const pages(cases[0].call(), {32, 0, true});
  auto const run = [&](int num_sms) {
    return sm90_case::launch<Paged<bfloat16_t, 128, 128, 128, 128, 8>>(pages.problem, num_sms);
  };
  sm90_case::check_calls(what.name, cases, run, runs);
  CHECK_EQ(runs, 1);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
