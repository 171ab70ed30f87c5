// Adds a tile of bias, copied by TMA, to S of a warp's 16 keys. S has keys in rows; the tile has
// queries in rows.
#pragma once

#include "tile/fragment.hpp"

namespace cutlass_attn::sm90 {

// ldmatrix.trans distributes 16 queries and 16 keys in the layout of wgmma's S.
//   tile:    (query, key) of the warpgroup's 64 keys, in shared memory
//   thread:  index among the consumer threads of the block
//   x:       S of the queries of the tile, in units of Score::add_bias()
template <class TileBias, class Arch, class Element, class Score, class Slice>
CUTE_DEVICE void add_tile_bias(char const* tile, int thread, Score const& score, Slice& x) {
  using Address = typename Arch::SmemAddress;
  static_assert(Slice::kSize == TileBias::kRows / 2 && TileBias::kColumns == 64);
  int const warp = thread / 32 % 4, lane = thread % 32;
  Address const queries =
      Arch::smem_address(tile) +
      Address(TileBias::offset(lane / 16 * 8 + lane % 8, warp * 16 + lane / 8 % 2 * 8));
  CUTE_UNROLL
  for (int n = 0; n < TileBias::kRows / 16; ++n) {
    uint32_t words[4];  // 8 queries: their first 8 keys, their last 8 keys; then 8 more queries
    Arch::ldmatrix_x4_trans(TileBias::block(queries, n, 0), words);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      uint16_t const bits = uint16_t(words[i / 2] >> i % 2 * 16);
      float& logit = x(i % 4, 0, 2 * n + i / 4);
      logit = score.add_bias(logit, element_to_float<Element>(bits));
    }
  }
}

}  // namespace cutlass_attn::sm90
