// The wgmma kernel whose warpgroups and blocks share keys, on the engine: right against fp64, with
// clusters of one to eight blocks, in every order of their threads.
#include <string>
#include <vector>

#include "simt/split_keys_case.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using cutlass::bfloat16_t;
using cutlass::half_t;

namespace {

// Sizes relative to 64 rows and, with two warpgroups, 256 keys of a block at once.
std::vector<Case> cases(int head_dim, int head_dim_v) {
  std::vector<Case> list(13);
  auto const set = [&](int i, char const* name, int queries, int keys) -> Case& {
    Case& what = list[size_t(i)];
    what.name = name, what.seqlen_q = queries, what.seqlen_k = keys;
    return what;
  };
  set(0, "whole tiles", 64, 256);
  set(1, "more tiles than warpgroups, ragged", 100, 700);
  Case& causal = set(2, "causal, grouped heads", 130, 600);
  causal.causal = true, causal.num_heads_q = 4, causal.num_heads_kv = 2;
  Case& none = set(3, "rows without keys", 300, 100);
  none.causal = none.sinks = true;
  Case& window = set(4, "window, warpgroups without keys", 90, 1500);
  window.window_left = 150, window.window_right = 30;
  Case& packed = set(5, "packed heads", 5, 1100);
  packed.num_heads_q = 8, packed.num_heads_kv = 2, packed.sinks = true;
  set(6, "large scores", 64, 1024).magnitude = 40;
  set(7, "no keys at all", 70, 0).batch = 2;
  Case& soft = set(8, "softcap, several sequences", 40, 520);
  soft.softcap = 3, soft.batch = 2, soft.causal = true;
  set(9, "one key", 1, 1);
  Case& two = set(10, "two tiles of each warpgroup", 100, 470);
  two.causal = true, two.magnitude = 40;
  Case& alibi = set(11, "ALiBi, slopes per batch, packed heads", 5, 900);
  alibi.num_heads_q = 8, alibi.num_heads_kv = alibi.batch = 2, alibi.alibi = "bh";
  Case& all = set(12, "ALiBi, softcap, causal, sinks", 100, 600);
  all.alibi = "h", all.softcap = 3, all.causal = all.sinks = true;
  return sm90_case::with_head_dims(list, head_dim, head_dim_v);
}

template <class Kernel>
void check_cases(DType dtype, int head_dim, int head_dim_v = 0) {
  int runs = 0;
  for (Case const& what : cases(head_dim, head_dim_v)) {
    for (int const blocks : {1, 2, 4, 8}) split_keys_case::check<Kernel>(what, dtype, blocks, runs);
  }
  CHECK_EQ(runs, 4 * 13);
}

TEST(head_dim_64) {
  check_cases<sm90::SplitKeys<half_t, TileShape<64, 64, 64, 128, 8>>>(DType::kFloat16, 64);
}
// V has another head dim than Q and K, and both are less than the tile's.
TEST(head_dim_128) {
  check_cases<sm90::SplitKeys<bfloat16_t, TileShape<128, 128, 64, 128, 8>>>(DType::kBFloat16, 104,
                                                                            120);
}

// Splits of keys for calls on 132 multiprocessors.
TEST(shares_of_the_keys) {
  KernelFacts facts;
  facts.block_m = 64;
  DeviceLimits gpu;
  gpu.num_sms = 132;
  auto const shares = [&](int batch, int heads, int queries, int keys, int head_dim = 64) {
    Problem p;
    p.batch = batch, p.num_heads_q = p.num_heads_kv = heads, p.head_dim = head_dim;
    p.seq_q.seqlen = queries, p.seq_k.seqlen = keys;
    return ClusterSplitsParams::num_splits(p, gpu, facts);
  };
  CHECK_EQ(shares(1, 4, 512, 256), 2);
  CHECK_EQ(shares(2, 8, 512, 512), 2);
  CHECK_EQ(shares(1, 4, 1024, 1024), 4);
  CHECK_EQ(shares(1, 1, 1024, 2048), 8);
  CHECK_EQ(shares(1, 1, 512, 4096), 16);
  CHECK_EQ(shares(1, 1, 64, 400), 2);
  CHECK_EQ(shares(1, 16, 256, 1024), 4);
  CHECK_EQ(shares(1, 64, 64, 1024), 4);
  // D = 128: the tiles of a head share K and V, or each has its own.
  CHECK_EQ(shares(1, 4, 1024, 1024, 128), 4);
  CHECK_EQ(shares(1, 64, 64, 1024, 128), 2);
  CHECK_EQ(shares(1, 11, 64, 4096, 64), 16);
  CHECK_EQ(shares(1, 11, 64, 4096, 128), 8);
  // More tiles than multiprocessors: the two warpgroups of a block.
  CHECK_EQ(shares(2, 8, 1024, 1024), 2);
  CHECK_EQ(shares(1, 8, 16, 1024), 4);
  CHECK_EQ(shares(1, 8, 17, 2048), 8);
  CHECK_EQ(shares(3, 8, 1, 8192), 4);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
