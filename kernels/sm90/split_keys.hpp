// Forward attention on wgmma and TMA for calls with few tiles of rows: the keys of a tile are split
// over the warpgroups of a block and the blocks of a cluster.
//
// Grid:       one cluster per 64 rows of a head; with fewer queries than that, of the heads of a KV
//             head together (core/scheduler.hpp)
// Block:      warpgroups that take tiles of kBlockN keys in turn (split_keys_group.hpp). Each has
//             buffers, barriers and a partial O
// Registers:  S and P of a key tile, O, softmax state of the rows
// Shared:     Q, and tiles of K and of V per warpgroup, swizzled by TMA, operands of wgmma; later O
// At the end: the partial results of all warpgroups of the cluster are merged
//             (split_keys_merge.hpp)
#pragma once

#include "arch/sm90.hpp"
#include "sm90/split_keys_group.hpp"
#include "sm90/split_keys_merge.hpp"

namespace cutlass_attn::sm90 {

template <class Element, class Shape>
struct SplitKeys : KernelDefaults {
  using Config = SplitKeysConfig<Traits<Element, Shape>>;
  using Shared = typename Config::SharedStorage;
  using Params = ClusterSplitsParams;
  using Machine = arch::Sm90;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kThreads = Config::kThreads, kSmemBytes = sizeof(Shared);
  static constexpr int kMinBlocksPerSm = 1;
  static constexpr bool kPacksHeads = true, kOverlapsGrids = true, kWaitsLater = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Arch::griddepcontrol_launch_dependents();
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    int const warp = Arch::uniform(Arch::thread() / 32);
    begin<Arch>(params, shared, warp);

    SplitKeysGroup<Config, Score, Arch> group(params, shared, warp);
    SplitKeysMerge<Config, Arch> const merge{params, shared};
    constexpr int kFirst = kThreads - kBlockM;  // first thread that copies nothing
    if (Arch::thread() >= kFirst) merge.set_target(shared.tile(), Arch::thread() - kFirst);

    group.run();
    merge.run(group);
  }

 private:
  // A block whose SM was busy runs this after the previous grid has ended, while all other blocks
  // wait for it. So warps run it in parallel with one barrier, and work before the first product
  // overlaps the copies.
  template <class Arch>
  CUTE_DEVICE static void begin(Params const& params, Shared& shared, int warp) {
    using Copy = SplitKeysCopy<Config, Arch>;
    // kCopies: a warp of the last warpgroup.
    constexpr int kMakesBarriers = 0, kCopies = kThreads / 32 - 4;
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
