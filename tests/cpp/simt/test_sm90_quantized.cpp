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

std::vector<Case> cases(int head_dim, int head_dim_v) {
  std::vector<Case> list = sm90_case::dense_cases();
  auto const add = [&](char const* name, int seqlen_q, int seqlen_k) {
    Case& what = list.emplace_back();
    what.name = name, what.seqlen_q = seqlen_q, what.seqlen_k = seqlen_k;
  };
  add("one key", 70, 1);
  add("no key", 70, 0);
  add("the last half of a pair of key blocks does not exist, NaN behind", 64, 65);
  for (Case& what : list) what.quantize = Quantize::kFp8;
  return sm90_case::with_head_dims(list, head_dim, head_dim_v);
}

template <class Kernel>
void check_cases(DType dtype, int head_dim, int head_dim_v) {
  int runs = 0;
  std::vector<Case> const all = cases(head_dim, head_dim_v);
  for (Case const& what : all) sm90_case::check_case<Kernel>(what, dtype, runs);
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
