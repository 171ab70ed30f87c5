// Tile shapes and shared memory of the wgmma kernel that splits keys over warpgroups.
#pragma once

#include "core/softmax.hpp"
#include "core/traits.hpp"
#include "core/vector.hpp"
#include "sm90/config.hpp"
#include "sm90/split_keys_params.hpp"

namespace cutlass_attn::sm90 {

template <class Traits>
struct SplitKeysConfig : WarpgroupProducts<Traits::kHeadDimV, Traits::kBlockN / 2> {
  using Element = typename Traits::Element;
  using ElementK = Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHalf = kBlockN / 2;
  static constexpr int kGroups = ClusterSplitsParams::kGroups, kGroupThreads = 128;
  static_assert(kGroups == 2 && kHeadDimV % 16 == 0);
  static constexpr int kThreads = kGroups * kGroupThreads;
  static_assert(kBlockM == 64 && Traits::kWarps == 4 * kGroups);
  using TileQ = SwizzledTile<kBlockM, whole_chunks(kHeadDim)>;
  using TileK = SwizzledTile<kBlockN, whole_chunks(kHeadDim)>;
  using TileV = SwizzledTile<kBlockN, whole_chunks(kHeadDimV)>;
  // Key tiles of a pass. Wider heads leave no registers for S of two tiles.
  static constexpr int kPassTiles = kHeadDim <= 64 && kHeadDimV <= 64 ? 2 : 1;
  // Stages of a warpgroup: as many as fit.
  static constexpr int kKStages = 2, kVStages = kPassTiles;
  // Columns of O to merge, in a thread's layout: four numbers of an m16n8 block.
  static constexpr int kColumnBlocks = kHeadDimV / 8;
  static constexpr int kShare = kColumnBlocks / kGroups;  // column blocks per warpgroup
  using Share = Quad[kShare][kGroupThreads];

  struct SharedStorage {
    alignas(1024) char q[TileQ::kBytes];
    // Tiles of K and V of a warpgroup. At the end, V's buffer holds the partial O for the other
    // warpgroup of the block and for other blocks.
    struct Buffers {
      char k[kKStages][TileK::kBytes];
      union {
        char v[kVStages][TileV::kBytes];
        struct {
          Share given, merged;
        };
      };
    } buffers[kGroups];
    SoftmaxRow rows[kGroups][kBlockM], merged_rows[kBlockM];
    // Addresses of a row's results. They take long to compute, so this overlaps the copies.
    struct Target {
      Element* o;  // null: no such row
      float* lse;  // null: not wanted
      float sink;  // -inf: no sink
    } targets[kBlockM];
    struct {
      alignas(16) char tile[sizeof(TileCoord)];
      TileRange range;  // in keys
      TileMask interval;
    } block;
    arch::Barrier q_full, k_full[kGroups][kKStages], v_full[kGroups][kVStages];

    CUTE_DEVICE TileCoord& tile() { return *reinterpret_cast<TileCoord*>(block.tile); }
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

}  // namespace cutlass_attn::sm90
