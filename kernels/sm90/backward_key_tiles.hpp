// The tiles of keys of a block: one, or, in a persistent block, one after the other until none is
// left.
//
// The producer warp of a persistent block takes a tile and publishes it while other warps are busy
// with the tile before. So its first copies overlap the end of that tile, and a warpgroup that is
// done begins at once: on an H200 a block of its own for each tile costs about four steps.
#pragma once

#include "sm90/backward_producer.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct BackwardKeyTiles {
  using Params = typename Config::Params;
  using Shared = typename Config::SharedStorage;
  using SeqInfo = typename Config::SeqInfo;
  static constexpr int kBlockN = Config::kBlockN;

  // The tile of keys with this index. Called by all lanes of a warp.
  CUTE_DEVICE static RowTile tile_of(Params const& params, int number) {
    Problem const& p = params.problem;
    return params.keys.template tile<kBlockN, Config::kIsVarlen, Arch>(p.seq_k, p.batch, number);
  }

  // Writes what is known of a tile with keys. Called by the first `threads` threads of the block.
  template <class KeyTile>
  CUTE_DEVICE static void write(Params const& params, RowTile const& tile, int threads,
                                KeyTile& to) {
    Problem const& p = params.problem;
    SeqInfo const seq(p, tile.batch);
    SeqLens const lens = seq.lens(p);
    int const end = tile.begin + kBlockN < lens.k ? tile.begin + kBlockN : lens.k;
    IntervalMask const mask = params.template mask<false>(lens);
    TileRange const range = mask.query_tiles(tile.begin, end, Config::kBlockM);
    if (Arch::thread() == 0) {
      to.exists = 1;
      to.seq = seq;
      to.tile = tile;
      to.range = range;
      int const tiles = range.end > range.begin ? range.end - range.begin : 0;
      to.num_steps = params.heads_per_kv * tiles;
      if constexpr (Config::kDrops) to.dropout = DropoutMask(p);
    }
    if constexpr (Config::kHasMask) {
      MapSteps<Config, Arch>::share_count(params, tile, to);
    } else {
      share_visible<Config, Arch>(mask, tile.begin, threads, to.visible, to.queries_of_key);
    }
  }

  // The producer warp.
  CUTE_DEVICE static void copy(Params const& params, Shared& shared) {
    if constexpr (!Config::kIsPersistent) {
      BackwardProducer<Config, Arch>(params, shared).run();
      return;
    }
    Ring<Config::kKeyTiles> at;
    Ring<Config::kStages> ring;
    for (int number = Arch::block(); number < params.keys.all; number = next(params)) {
      RowTile const tile = tile_of(params, params.tile_of_block(number));
      if (tile.begin >= SeqInfo(params.problem, tile.batch).lens(params.problem).k) continue;
      Arch::mbarrier_wait(&shared.tile_empty[at.stage], at.round ^ 1);
      write(params, tile, 32, shared.tiles[at.stage]);
      Arch::sync_warp();  // the KeyTile is full, and published with K
      BackwardProducer<Config, Arch> producer(params, shared, at.stage, ring);
      producer.run();
      ring = producer.ring;
      at.advance();
    }
    Arch::mbarrier_wait(&shared.tile_empty[at.stage], at.round ^ 1);
    if (Arch::elect()) {
      shared.tiles[at.stage].exists = 0;
      Arch::mbarrier_arrive(&shared.tile_full[at.stage]);
    }
  }

 private:
  // Index of the next tile of this block.
  CUTE_DEVICE static int next(Params const& params) {
    int taken = 0;
    if (Arch::thread() == 0) taken = Arch::atom_add(params.tickets(), 1);
    return params.blocks + Arch::shuffle(taken, 0);
  }
};

}  // namespace cutlass_attn::sm90
