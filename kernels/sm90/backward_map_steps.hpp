// Query tiles that a block with a bool mask visits, from the query map.
#pragma once

#include "sm90/backward_config.hpp"

namespace cutlass_attn::sm90 {

// Iterates over the query tiles that see any key of the block, of all query heads that read the KV
// head. Called by all lanes of a warp: each lane holds the class of one of 32 tiles.
template <class Config, class Arch>
struct MapSteps {
  using Params = typename Config::Params;

  Params const& params;
  RowTile const& keys;
  int head, tile = 0, number = 0;
  int word = -1;      // present group of 32 tiles of the map
  uint32_t left = 0;  // tiles of the group that are not empty and come after the present one
  uint32_t full = 0;  // full tiles of the group

  template <class Block>
  CUTE_DEVICE MapSteps(Params const& params, Block const& block)
      : params(params), keys(block.tile), head(block.tile.head * params.heads_per_kv) {}

  // Moves to the next step, which must exist.
  CUTE_DEVICE void begin() {
    QueryMap const& map = params.map;
    while (left == 0) {
      if (++word * 32 >= map.query_tiles) {
        word = 0;
        ++head;
      }
      int const at = word * 32 + Arch::thread() % 32;
      auto found = TileClass::kEmpty;
      if (at < map.query_tiles) found = map.classes[first_tile() + at];
      left = Arch::ballot(found != TileClass::kEmpty);
      full = Arch::ballot(found == TileClass::kFull);
    }
    int const bit = first_bit(left);
    left &= left - 1;
    tile = word * 32 + bit;
  }
  // steps: number of steps of the block.
  CUTE_DEVICE void advance(int steps) {
    if (++number < steps) begin();
  }

  CUTE_DEVICE int64_t number_of(Params const&, int batch) const {
    return params.queries.template number<Config::kBlockM, false>(
        params.problem.seq_q, {batch, head, tile * Config::kBlockM});
  }
  CUTE_DEVICE MapStep published() const {
    bool const is_full = full >> tile % 32 & 1;
    return {int32_t(number_of(params, keys.batch)), is_full ? -1 : int32_t(first_tile()) + tile,
            head, tile};
  }

  // Counts the steps of the block with these keys. Called by all threads of the block.
  template <class Block>
  CUTE_DEVICE static void share_count(Params const& params, RowTile const& keys, Block& block) {
    if (Arch::thread() >= 32) return;
    QueryMap const& map = params.map;
    int const heads = map.num_heads == 1 ? 1 : params.heads_per_kv;
    int count = 0;
    CUTE_NO_UNROLL
    for (int i = 0; i < heads; ++i) {
      int const head = keys.head * params.heads_per_kv + i;
      auto const* const classes =
          map.classes + map.first_tile(keys.batch, head, keys.begin / Config::kBlockN);
      for (int at = Arch::thread() % 32; at < map.query_tiles; at += 32) {
        count += classes[at] != TileClass::kEmpty;
      }
    }
    CUTE_UNROLL
    for (int lanes = 1; lanes < 32; lanes *= 2) count += Arch::shuffle_xor(count, lanes);
    if (Arch::thread() == 0) block.num_steps = count * (params.heads_per_kv / heads);
  }

 private:
  CUTE_DEVICE int64_t first_tile() const {
    return params.map.first_tile(keys.batch, head, keys.begin / Config::kBlockN);
  }
  CUTE_DEVICE static int first_bit(uint32_t x) {
#if defined(__CUDA_ARCH__)
    return __ffs(int(x)) - 1;
#else
    return __builtin_ctz(x);
#endif
  }
};

}  // namespace cutlass_attn::sm90
