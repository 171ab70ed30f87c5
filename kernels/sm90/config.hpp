// Tile shapes and shared memory of the wgmma forward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "arch/mbarrier.hpp"
#include "core/key_tiles.hpp"
#include "core/mask.hpp"
#include "core/scheduler.hpp"
#include "sm90/params.hpp"
#include "tile/fragment.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm90 {

// What sm80::Products asks for, of a warpgroup that has 64 rows.
template <int kHeadDimV, int kBlockN>
struct WarpgroupProducts {
  using Place = FragmentPlace<4, 1>;  // by thread
  using QkAccumulator = float;
  using PvAccumulator = float;
  static constexpr bool kIsFp8 = false;
  static constexpr int kWarpsM = 4, kRowBlocks = 1, kWarpColumns = kHeadDimV;
  static constexpr int kRows = 2;  // of a thread
  template <class Score>
  static constexpr int key_block() {
    return kBlockN;
  }
  template <class Accumulator, int kColumns>
  using Fragment = cutlass_attn::Fragment<Accumulator, kRowBlocks, kColumns / 8>;
};

// Chunks of 64 columns: TMA fills what is beyond a head dim with zeros.
constexpr int whole_chunks(int columns) { return (columns + 63) / 64 * 64; }

// From a descriptor's first 16 columns to the i-th, of a tile with chunks of 64.
template <class Tile>
CUTE_HOST_DEVICE constexpr int column_step(int i) {
  return (i / 4 * Tile::kChunkBytes + i % 4 * 32) / 16;
}

// kWarps warps, in warpgroups of four with 64 rows each, compute; another warpgroup copies.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          RowLayout kLayout, bool kHasBias_ = false, bool kHasMask_ = false>
struct Config : WarpgroupProducts<kHeadDimV_, kBlockN_> {
  using Element = Element_;
  static_assert(kLayout != RowLayout::kPaged);
  static constexpr bool kIsDense = kLayout == RowLayout::kDense;
  static constexpr bool kHasBias = kHasBias_, kHasMask = kHasMask_;
  static_assert(!kHasBias || kBlockN_ % 64 == 0, "TMA copies 64 keys of it at a time");
  static_assert(kIsDense || !(kHasBias || kHasMask));
  using DenseParams = std::conditional_t<kHasBias, BiasTmaParams, TmaParams>;
  using Params = std::conditional_t<kHasMask, MaskedParams<DenseParams>,
                                    std::conditional_t<kIsDense, DenseParams, VarlenTmaParams>>;
  using Coord = BasicTileCoord<std::conditional_t<kIsDense, DenseSeqInfo, VarlenSeqInfo>>;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kGroups = kWarps_ / 4;  // warpgroups that compute
  static constexpr int kGroupRows = 64;        // rows of each: M of wgmma
  static constexpr int kGroupThreads = 128;
  static constexpr int kThreads = kGroupThreads * (kGroups + 1);
  static_assert(kBlockM == kGroups * kGroupRows && (kGroups == 1 || kGroups == 2 || kGroups == 3));

  // Registers of a thread that copies and of one that computes; all together 64 K.
  static constexpr int kCopyRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kComputeRegisters = kGroups == 3 ? 160 : kGroups == 2 ? 232 : 240;

  using TileQ = SwizzledTile<kGroupRows, whole_chunks(kHeadDim)>;
  using TileK = SwizzledTile<kBlockN, whole_chunks(kHeadDim)>;
  using TileV = SwizzledTile<kBlockN, whole_chunks(kHeadDimV)>;
  // Of the bias of a warpgroup's rows: query, key. Those of all come with K, and lie behind it.
  using TileBias = SwizzledTile<kGroupRows, kBlockN>;
  static constexpr int kKBytes = TileK::kBytes + (kHasBias ? kGroups * TileBias::kBytes : 0);
  using Place = FragmentPlace<4 * kGroups, 1>;  // by thread of those that compute

  // Two tiles of Q, so that the next one is there before this one is done with, if that leaves room
  // for three of K and of V (with two, d128 is 10 % slower on an H200); of those as many as there
  // is room for.
  static constexpr int kMaxSmemBytes = 227 * 1024, kOtherBytes = 2048;
  static constexpr int room(int q_stages) {
    return kMaxSmemBytes - kOtherBytes - q_stages * kGroups * TileQ::kBytes;
  }
  static constexpr int kPairBytes = kKBytes + TileV::kBytes;
  static constexpr int kQStages = room(2) >= 3 * kPairBytes ? 2 : 1;
  static constexpr int kPairs = room(kQStages) / kPairBytes;
  static_assert(kPairs >= 2, "too little shared memory for two tiles of K and V");
  static constexpr int kVStages = kPairs;
  static constexpr int kKStages =
      room(kQStages) - kPairs * kPairBytes >= kKBytes ? kPairs + 1 : kPairs;

  // The number of the next tile of rows is asked for before this one's keys are copied: then the
  // next Q and K are there in time. With one buffer of Q it is no faster, and a block that has
  // taken a tile too early leaves others idle at the end (d256 causal: 5 % on an H200).
  static constexpr bool kAsksEarly = kQStages > 1;

  // Warpgroups begin a tile of rows one after the other: so one multiplies while another has the
  // exponentials. Where all begin at once, that takes several tiles of keys to come about (d64
  // 192x128x12 on an H200: 3200 clocks for each of the first three, and 2100 for the later ones).
  // Wider heads, whose tensor cores have no gaps, are up to 3 % slower for it.
  static constexpr bool kTakesTurns = kGroups > 1 && kHeadDim <= 64;

  // Where the last keys of a warpgroup's rows are in the first half of their tile, as under a
  // causal mask for every other 64 rows, P V is of so many keys alone, in a copy of the step. Three
  // warpgroups have no registers for it. (With S of so many keys, too, wgmma in flight were
  // serialized: C7511 of NVRTC's ptxas.)
  static constexpr int kHalf = kBlockN == 128 && kGroups < 3 && !kHasMask ? 64 : kBlockN;

  // Tiles of keys: with a mask the same ones for all warpgroups.
  using Tiles = std::conditional_t<kHasMask, MapTiles<kBlockN>, RangeTiles<kBlockN>>;
  struct Unmasked {};
  struct Masked {
    Tiles tiles;
    uint32_t const* bits;  // of the mask map, for the tile of rows
  };

  // What those who compute have to know of a tile; its thread that copies works it out.
  struct TileInfo : std::conditional_t<kHasMask, Masked, Unmasked> {
    int32_t is_there;  // 0: there are no more tiles
    Coord tile;
    // Not set where there is a mask:
    TileRange range;            // of keys, for all rows: what is copied
    TileRange ranges[kGroups];  // and for those of a warpgroup
    int32_t is_half[kGroups];   // whether they see the first half of its last tile alone
    NearMask interval;
    CUTE_HOST_DEVICE explicit TileInfo(Coord const& tile) : tile(tile) {}
  };
  // Of which tiles of keys those of a warpgroup are made, and those that are copied.
  CUTE_DEVICE static typename Tiles::Start const& start_of(TileInfo const& info, int group) {
    if constexpr (kHasMask) {
      return info.tiles;
    } else {
      return info.ranges[group];
    }
  }
  CUTE_DEVICE static typename Tiles::Start const& start_of_copies(TileInfo const& info) {
    if constexpr (kHasMask) {
      return info.tiles;
    } else {
      return info.range;
    }
  }

  // Of the tile of rows that is computed, and of the next. With two buffers of Q two more, or the
  // next Q waits until the O before this one is stored (d64 causal 16x1024 on an H100: 5 %).
  static constexpr int kInfos = kQStages > 1 ? 4 : 2;

  struct SharedStorage {
    alignas(1024) char q[kQStages][kGroups][TileQ::kBytes];
    char k[kKStages][kKBytes];
    char v[kVStages][TileV::kBytes];
    alignas(16) char infos[kInfos][sizeof(TileInfo)];
    // Full: the copy has landed. Empty: it is read by none any more.
    arch::Barrier q_full[kQStages][kGroups], q_empty[kQStages][kGroups];
    arch::Barrier k_full[kKStages], k_empty[kKStages];
    arch::Barrier v_full[kVStages], v_empty[kVStages];
    arch::Barrier info_full[kInfos], info_empty[kInfos];
    arch::Barrier has_begun[kInfos][kGroups];  // a warpgroup: its first S is there

    CUTE_DEVICE TileInfo& info(int i) { return *reinterpret_cast<TileInfo*>(infos[i]); }
  };
  static_assert(sizeof(SharedStorage) <= kMaxSmemBytes);
};

// Which buffer of kSize, a power of two, the n-th tile of rows of a block has, and in which round.
template <int kSize>
CUTE_DEVICE int stage_of(uint32_t n) {
  static_assert((kSize & (kSize - 1)) == 0);
  return int(n % kSize);
}
template <int kSize>
CUTE_DEVICE int round_of(uint32_t n) {
  return int(n / kSize % 2);
}

// Which buffer of several is the next one, and in which round.
template <int kSize>
struct Ring {
  int stage = 0, round = 0;  // round: modulo 2, the parity of the barrier's phase

  // The one that was used last.
  CUTE_DEVICE int last() const { return (stage == 0 ? kSize : stage) - 1; }
  CUTE_DEVICE void advance() {
    if (++stage == kSize) {
      stage = 0;
      round ^= 1;
    }
  }
};

}  // namespace cutlass_attn::sm90
