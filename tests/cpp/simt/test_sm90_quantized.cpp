// The wgmma forward kernel in 8 bits on the engine: right against fp64 on rounded operands,
// whatever the order of its threads and however many tiles a block has.
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "simt/sm90_case.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using cutlass::bfloat16_t;
using cutlass::half_t;

namespace {

using Accumulators = with::Accumulators<int32_t, half_t>;  // of int8 and of e4m3 products

// Sizes against tiles of 128 rows, in warpgroups of 64, and 128 keys in blocks of 64.
std::vector<Case> cases() {
  std::vector<Case> list(17);
  list[0].name = "whole tiles", list[0].seqlen_q = 128, list[0].seqlen_k = 256;
  list[1].name = "ragged, grouped heads", list[1].seqlen_q = 200, list[1].seqlen_k = 333;
  list[1].num_heads_q = 4, list[1].num_heads_kv = 2, list[1].batch = 2;
  list[2].name = "causal", list[2].seqlen_q = 270, list[2].seqlen_k = 400, list[2].causal = true;
  list[3].name = "rows without keys", list[3].seqlen_q = 300, list[3].seqlen_k = 100;
  list[3].causal = true;
  list[4].name = "window, warpgroups of other keys than each other", list[4].seqlen_q = 330;
  list[4].seqlen_k = 700, list[4].window_left = 150, list[4].window_right = 30;
  list[5].name = "packed heads", list[5].seqlen_q = 5, list[5].seqlen_k = 200;
  list[5].num_heads_q = 8, list[5].num_heads_kv = 2, list[5].sinks = true;
  list[6].name = "large scores", list[6].seqlen_q = 128, list[6].seqlen_k = 512;
  list[6].magnitude = 40;
  list[7].name = "no warpgroup for the last rows", list[7].seqlen_q = 132, list[7].seqlen_k = 900;
  list[7].window_left = 300, list[7].window_right = 0;
  list[8].name = "several tiles of a block", list[8].seqlen_q = 260, list[8].seqlen_k = 260;
  list[8].batch = 2, list[8].num_heads_q = list[8].num_heads_kv = 2, list[8].causal = true;
  list[9].name = "chunks, several in a tile of rows", list[9].seqlen_q = 300;
  list[9].seqlen_k = 500, list[9].attention_chunk = 70, list[9].causal = true;
  list[10].name = "chunks, several tiles of keys each, softcap", list[10].seqlen_q = 270;
  list[10].seqlen_k = 700, list[10].attention_chunk = 300, list[10].softcap = 3;
  list[11].name = "more tiles of keys than buffers";
  list[11].seqlen_q = 256, list[11].seqlen_k = 1000;
  list[12].name = "ALiBi, causal, grouped heads", list[12].seqlen_q = 200, list[12].causal = true;
  list[12].seqlen_k = 333, list[12].num_heads_q = 4, list[12].num_heads_kv = 2;
  list[12].alibi = "h";
  list[13].name = "ALiBi on both sides, slopes per batch, packed heads, sinks";
  list[13].seqlen_q = 21, list[13].seqlen_k = 300, list[13].batch = 2;
  list[13].num_heads_q = 8, list[13].num_heads_kv = 2, list[13].alibi = "bh";
  list[13].sinks = true;
  list[14].name = "one key", list[14].seqlen_q = 70, list[14].seqlen_k = 1;
  list[15].name = "no key", list[15].seqlen_q = 70, list[15].seqlen_k = 0;
  list[16].name = "the last half of a pair of key blocks does not exist, NaN behind";
  list[16].seqlen_q = 64, list[16].seqlen_k = 65;
  return list;
}

template <class Kernel>
void check_cases(DType dtype, int head_dim, int head_dim_v) {
  int runs = 0;
  auto const all = sm90_case::with_head_dims(cases(), head_dim, head_dim_v);
  for (Case what : all) {
    what.quantize = Quantize::kFp8;
    sm90_case::check_case<Kernel>(what, dtype, runs);
  }
  CHECK_EQ(runs, int(all.size()));
}

TEST(head_dim_64) {
  check_cases<sm90::QuantizedForward<half_t, TileShape<64, 64, 192, 128, 12>, Accumulators>>(
      DType::kFloat16, 64, 64);
}
TEST(head_dim_64_two_warpgroups) {
  check_cases<sm90::QuantizedForward<bfloat16_t, TileShape<64, 64, 128, 128, 8>, Accumulators>>(
      DType::kBFloat16, 56, 40);
}
TEST(head_dim_128) {
  check_cases<sm90::QuantizedForward<bfloat16_t, TileShape<128, 128, 128, 128, 8>, Accumulators>>(
      DType::kBFloat16, 128, 128);
}
TEST(head_dim_256) {
  check_cases<sm90::QuantizedForward<half_t, TileShape<256, 256, 128, 128, 8>, Accumulators>>(
      DType::kFloat16, 256, 256);
}
TEST(head_dims_less_than_the_tile) {
  check_cases<sm90::QuantizedForward<half_t, TileShape<256, 256, 128, 128, 8>, Accumulators>>(
      DType::kFloat16, 200, 136);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
