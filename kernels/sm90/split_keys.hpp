// Forward attention on wgmma and TMA for few tiles of rows: the keys of a tile are split over the
// warpgroups of a block and over the blocks of a cluster.
//
// Grid:       a cluster of blocks for every 64 rows of a head, or of the heads of one KV head
//             together where there are fewer queries (core/scheduler.hpp)
// Block:      warpgroups that take tiles of kBlockN keys in turn (split_keys_group.hpp), each with
//             buffers, barriers and an O of its own
// Registers:  S and P of a tile of keys, O, softmax state of the rows
// Shared:     Q, and tiles of K and of V of each warpgroup, swizzled by TMA, read by wgmma; then O
// At the end: the parts of all warpgroups of the cluster are merged (split_keys_merge.hpp)
#pragma once

#include "arch/sm90.hpp"
#include "sm90/split_keys_group.hpp"
#include "sm90/split_keys_merge.hpp"

namespace cutlass_attn::sm90 {

template <class Element, class Shape>
struct SplitKeys {
  using Config = SplitKeysConfig<Traits<Element, Shape>>;
  using Shared = typename Config::SharedStorage;
  using Params = ClusterSplitsParams;
  using Machine = arch::Sm90;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kThreads = Config::kThreads, kSmemBytes = sizeof(Shared);
  static constexpr int kMinBlocksPerSm = 1;
  static constexpr bool kPacksHeads = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Arch::let_next_grid_begin();
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    int const warp = Arch::uniform(Arch::thread() / 32);
    begin<Arch>(params, shared, warp);

    SplitKeysGroup<Config, Score, Arch> group(params, shared, warp);
    SplitKeysMerge<Config, Arch> const merge{params, shared};
    constexpr int kFirst = kThreads - kBlockM;  // the first thread that copies nothing
    if (Arch::thread() >= kFirst) merge.set_target(shared.tile(), Arch::thread() - kFirst);

    group.run();
    merge.run(group);
  }

 private:
  // A block whose SM was busy does this after the previous grid has ended, while all others wait
  // for it. So warps do it in parallel and meet once, and the work before the first product
  // overlaps the copies.
  template <class Arch>
  CUTE_DEVICE static void begin(Params const& params, Shared& shared, int warp) {
    using Copy = SplitKeysCopy<Config, Arch>;
    constexpr int kMakesBarriers = 0, kCopies = kThreads / 32 - 4;  // a warp of the last warpgroup
    TileCoord tile = {};
    TileRange range = {};
    if (warp == kCopies) {
      tile = params.tile<kBlockM, Arch>();
      range = params.interval.tiles(tile.q_begin, tile.q_end, kBlockN).in_keys(kBlockN);
      if (Arch::elect()) {
        shared.tile() = tile;
        shared.block.range = range;
        shared.block.interval = params.interval.from(tile.q_begin);
      }
    } else if (warp == kMakesBarriers && Arch::elect()) {
      Copy::make_barriers(params, shared);
    }
    Arch::sync();  // barriers initialised, shared.block full
    if (warp == kCopies && Arch::elect()) Copy{params, shared, tile, range}.begin();
  }
};

}  // namespace cutlass_attn::sm90
