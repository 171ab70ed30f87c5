// Copies that the blocks of a cluster share, which go through the same keys.
//
// Each of the two blocks brings in half of the rows of each unit: TMA copies them to both blocks,
// or the block passes them on to the other one. So both have whole tiles, and read half of them
// from global memory. A stage is released to the copying warps of both blocks. A block without a
// partner brings in all rows.
#pragma once

#include "core/opaque.hpp"
#include "sm90/latent_config.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct LatentCluster {
  using Shared = typename Config::SharedStorage;
  using TileK = typename Config::TileK;
  static_assert(Config::kUnit == 2 * TileK::kGroupRows, "half of a unit is contiguous");

  typename Config::Params const& params;
  Shared& shared;

  CUTE_DEVICE bool is_shared() const { return params.cluster > 1; }
  // opaque: what follows from the rank, kept for all units, would take registers.
  CUTE_DEVICE int rank() const { return Arch::block() & (opaque(params.cluster) - 1); }
  // Rows of a unit that this block brings in: `count` rows from `first` on.
  CUTE_DEVICE int first() const { return rank() * TileK::kGroupRows; }
  CUTE_DEVICE int count() const { return Config::kUnit >> (opaque(params.cluster) - 1); }

  // Makes what this warp stored visible to wgmma, and to pass(). All lanes call it, after their own
  // copies have landed.
  CUTE_DEVICE static void make_visible() {
    Arch::fence_proxy_async();
    Arch::sync_warp();  // stored by all lanes
  }

  // Passes columns of this block's rows of a unit, whole chunks, to the other block. TMA reads and
  // writes them, as wgmma of the other block does: so a fence in this block is enough. They count
  // for that block's barrier, which may happen before its own arrive() announces them, but not
  // before it is in that phase: this warp has waited for its release of the stage.
  CUTE_DEVICE void pass(int stage, int unit, int first_chunk, int chunks) const {
    if (!is_shared() || !Arch::elect()) return;
    Arch::cp_async_bulk(
        shared.k[stage] + TileK::offset(unit * Config::kUnit + first(), first_chunk * 64),
        chunks * TileK::kChunkBytes, 1 - rank(), &shared.k_full[stage]);
  }

  // The warp's rows of a unit are there. Those of the other block count by their bytes.
  CUTE_DEVICE void arrive(int stage, int lane) const {
    int const bytes = (opaque(params.cluster) - 1) * TileK::kGroupBytes;
    if (lane == 0) Arch::mbarrier_arrive_expect_tx(&shared.k_full[stage], bytes);
  }

  // Releases a stage, `arrivals` times in each block. Called by all lanes of a warp, whose wgmma
  // have read it and are complete.
  CUTE_DEVICE void release(int stage, int lane, int arrivals = 1) const {
    Arch::sync_warp();  // read by all lanes
    if (lane < arrivals * params.cluster) {
      Arch::mbarrier_arrive_cluster(&shared.k_empty[stage], lane & (params.cluster - 1));
    }
  }

  // All threads call it, after their last tile. Then no block writes to another block's memory, or
  // has it read by a copy, so that it may be used for other data and the block may exit.
  CUTE_DEVICE static void leave() { Arch::cluster_sync(); }
};

}  // namespace cutlass_attn::sm90
