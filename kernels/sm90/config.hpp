// Tile shapes and shared memory of the wgmma forward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "arch/mbarrier.hpp"
#include "core/dropout.hpp"
#include "core/key_tiles.hpp"
#include "core/mask.hpp"
#include "core/scheduler.hpp"
#include "core/traits.hpp"
#include "sm90/params.hpp"
#include "tile/fragment.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm90 {

// Traits required by Products: a warpgroup has 64 rows.
template <int kHeadDimV, int kBlockN>
struct WarpgroupProducts {
  using Place = FragmentPlace<4, 1>;  // by thread
  using QkAccumulator = float;
  using PvAccumulator = float;
  static constexpr int kWarpsM = 4, kRowBlocks = 1, kWarpColumns = kHeadDimV;
  static constexpr int kRows = 2;  // of a thread
  template <class Score>
  static constexpr int key_block() {
    return kBlockN;
  }
  template <class Accumulator, int kColumns>
  using Fragment = cutlass_attn::Fragment<Accumulator, kRowBlocks, kColumns / 8>;
};

// Head dims are rounded up to chunks of 64 columns. TMA fills columns beyond a head dim with zeros.
constexpr int whole_chunks(int columns) { return (columns + 63) / 64 * 64; }

// Offset of the i-th 16 columns in a descriptor, for a tile in chunks of 64 columns.
template <class Tile>
CUTE_HOST_DEVICE constexpr int column_step(int i) {
  return (i / 4 * Tile::kChunkBytes + i % 4 * 32) / 16;
}

// Tiles of K and V in shared memory, in the dtype of Q.
template <class Traits>
struct SameKv {
  using TileK = SwizzledTile<Traits::kBlockN, whole_chunks(Traits::kHeadDim)>;
  using TileV = SwizzledTile<Traits::kBlockN, whole_chunks(Traits::kHeadDimV)>;
  using Params = void;  // those of the layout of rows
  // Whether consumers may process the first half of a key tile only.
  static constexpr bool kHasHalves = false;
  static constexpr int kScaleBytes = 0;  // of a tile's scales, which are copied with K
};

// Consumer warps form warpgroups of four, with 64 rows each. One more warpgroup is the producer.
// Kv defines the tiles of K and V.
template <class Traits, class Kv = SameKv<Traits>>
struct Config : WarpgroupProducts<Traits::kHeadDimV, Traits::kBlockN> {
  using Element = typename Traits::Element;
  using ElementK = Element;
  static constexpr bool kIsDense = Traits::kIsDense, kIsPaged = Traits::kIsPaged;
  static constexpr bool kHasBias = Traits::kHasBias, kHasMask = Traits::kHasMask;
  static constexpr bool kDrops = Traits::kDrops;
  static_assert(!kHasBias || Traits::kBlockN % 64 == 0, "TMA copies 64 keys of it at a time");
  static_assert(kIsDense || !(kHasBias || kHasMask));
  using DenseParams = std::conditional_t<kHasBias, BiasTmaParams, TmaParams>;
  using RaggedParams = std::conditional_t<kIsPaged, PagedTmaParams, VarlenTmaParams>;
  using ParamsOfRows = std::conditional_t<kHasMask, MaskedParams<DenseParams>,
                                          std::conditional_t<kIsDense, DenseParams, RaggedParams>>;
  using Params = std::conditional_t<std::is_same_v<typename Kv::Params, void>, ParamsOfRows,
                                    typename Kv::Params>;
  using Coord = BasicTileCoord<typename Traits::SeqInfo>;
  static constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static_assert(Traits::kWarpsN == 1);
  static constexpr int kGroups = Traits::kWarps / 4;  // consumer warpgroups
  static constexpr int kGroupRows = 64;               // rows of a consumer warpgroup: M of wgmma
  static constexpr int kGroupThreads = 128;
  static constexpr int kThreads = kGroupThreads * (kGroups + 1);
  static_assert(kBlockM == kGroups * kGroupRows && (kGroups == 1 || kGroups == 2 || kGroups == 3));

  // Warps that copy. One thread keeps up with whole tiles, but not with the copies of pages: with
  // pages of 16 keys, 32 copies of 60 to 100 clocks per tile of 2100 (D = 128 on an H200).
  static constexpr int kCopyWarps = kIsPaged ? 4 : 1;

  // Registers of a producer thread and of a consumer thread. A block has 64 K registers in total.
  static constexpr int kCopyRegisters = kGroups == 3 ? 32 : 40;
  static constexpr int kComputeRegisters = kGroups == 3 ? 160 : kGroups == 2 ? 232 : 240;

  using TileQ = SwizzledTile<kGroupRows, whole_chunks(kHeadDim)>;
  using TileK = typename Kv::TileK;
  using TileV = typename Kv::TileV;
  // Bias of a warpgroup's rows: (query, key). The tiles of all warpgroups follow K in its buffer.
  using TileBias = SwizzledTile<kGroupRows, kBlockN>;
  // Scales follow it too, in as many bytes as tiles are aligned to.
  static constexpr int kScaleBytes = Kv::kScaleBytes;
  static constexpr int kKBytes =
      TileK::kBytes + (kHasBias ? kGroups * TileBias::kBytes : 0) + (kScaleBytes > 0 ? 1024 : 0);
  using Place = FragmentPlace<4 * kGroups, 1>;  // by consumer thread

  // Q has two stages, so that the next tile arrives early, if three tiles of K and V still fit
  // (with two, d128 is 10 % slower on an H200). K and V get the remaining shared memory.
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

  // The producer fetches the next tile number before it copies the keys of this tile, so that the
  // next Q and K arrive in time. With one stage of Q this is no faster, and a block that fetches
  // its next tile too early leaves other blocks idle at the end (d256 causal: 5 % on an H200).
  static constexpr bool kAsksEarly = kQStages > 1;

  // Warpgroups begin a tile of rows one after the other, so that one multiplies while another
  // computes exponentials. If all begin at once, they drift apart only after several key tiles (d64
  // 192x128x12 on an H200: 3200 clocks for each of the first three, 2100 for later ones). Wider
  // heads leave no gaps between products; turns make them up to 3 % slower.
  static constexpr bool kTakesTurns = kGroups > 1 && kHeadDim <= 64;

  // If a warpgroup's rows see only the first half of their last key tile, as every other 64 rows do
  // under a causal mask, a second copy of the step multiplies P V of that half only. Three
  // warpgroups have no registers for it. (With half of S as well, ptxas of NVRTC 13.0 serialized
  // wgmma: C7511.)
  static constexpr int kHalf =
      Kv::kHasHalves || (kBlockN == 128 && kGroups < 3 && !kHasMask) ? 64 : kBlockN;

  // Key tiles. With a bool mask all warpgroups of a block visit equal tiles.
  using Tiles = std::conditional_t<kHasMask, MapTiles<kBlockN>, RangeTiles<kBlockN>>;
  struct Unmasked {};
  struct Masked {
    Tiles tiles;
    uint32_t const* bits;  // of the mask map, for the tile of rows
  };
  struct Paged {
    KeyRange visible;  // keys seen by some row of the tile
  };

  // Metadata of a tile of rows, written by the producer for the consumers and for the other warps
  // that copy.
  struct TileInfo
      : std::conditional_t<kHasMask, Masked, std::conditional_t<kIsPaged, Paged, Unmasked>> {
    int32_t exists;  // 0: no tile is left
    Coord tile;
    // Set only in kernels without a bool mask:
    TileRange range;            // keys that are copied: those of all rows
    TileRange ranges[kGroups];  // keys of each warpgroup's rows
    int32_t is_half[kGroups];   // whether these rows see only the first half of their last tile
    TileMask interval;
    CUTE_HOST_DEVICE explicit TileInfo(Coord const& tile) : tile(tile) {}
  };
  // Start of a warpgroup's key tiles, and of the key tiles that are copied.
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

  // One TileInfo for the present tile of rows and one for the next. With two stages of Q there are
  // four; otherwise the next Q would wait until the previous O is stored (d64 causal 16x1024 on an
  // H100: 5 %).
  static constexpr int kInfos = kQStages > 1 ? 4 : 2;

  struct NoDropout {};
  struct Dropout {
    DropoutMask dropout;
  };
  struct Copies {
    alignas(1024) char q[kQStages][kGroups][TileQ::kBytes];
    char k[kKStages][kKBytes];
    char v[kVStages][TileV::kBytes];
    alignas(16) char infos[kInfos][sizeof(TileInfo)];
    // Full: the copy has landed. Empty: all consumers have released it.
    arch::Barrier q_full[kQStages][kGroups], q_empty[kQStages][kGroups];
    arch::Barrier k_full[kKStages], k_empty[kKStages];
    arch::Barrier v_full[kVStages], v_empty[kVStages];
    arch::Barrier info_full[kInfos], info_empty[kInfos];
    arch::Barrier has_begun[kInfos][kGroups];  // the warpgroup has its first S

    CUTE_DEVICE TileInfo& info(int i) { return *reinterpret_cast<TileInfo*>(infos[i]); }
  };
  struct SharedStorage : Copies, std::conditional_t<kDrops, Dropout, NoDropout> {};
  static_assert(sizeof(SharedStorage) <= kMaxSmemBytes);
};

// Initialises the barriers of a block's SharedStorage, by one thread.
template <class Config, class Arch>
CUTE_DEVICE void init_barriers(typename Config::SharedStorage& shared) {
  constexpr int kWarpsOfGroup = 4, kReaders = kWarpsOfGroup * Config::kGroups;
  constexpr int kCopyWarps = Config::kCopyWarps;
  auto const init = [](arch::Barrier* full, arch::Barrier* empty, int readers, int writers = 1) {
    Arch::mbarrier_init(full, writers);
    Arch::mbarrier_init(empty, readers);
  };
  for (int i = 0; i < Config::kQStages; ++i) {
    for (int j = 0; j < Config::kGroups; ++j) {
      init(&shared.q_full[i][j], &shared.q_empty[i][j], kWarpsOfGroup);
    }
  }
  for (int i = 0; i < Config::kKStages; ++i) {
    init(&shared.k_full[i], &shared.k_empty[i], kReaders, kCopyWarps);
  }
  for (int i = 0; i < Config::kVStages; ++i) {
    init(&shared.v_full[i], &shared.v_empty[i], kReaders, kCopyWarps);
  }
  for (int i = 0; i < Config::kInfos; ++i) {
    init(&shared.info_full[i], &shared.info_empty[i], kReaders + kCopyWarps - 1);
    for (int j = 0; j < Config::kGroups; ++j) {
      Arch::mbarrier_init(&shared.has_begun[i][j], kWarpsOfGroup);
    }
  }
  Arch::fence_mbarrier_init();
}

// Stage and round of a block's n-th tile of rows, for kSize stages, a power of two.
template <int kSize>
CUTE_DEVICE int stage_of(uint32_t n) {
  static_assert((kSize & (kSize - 1)) == 0);
  return int(n % kSize);
}
template <int kSize>
CUTE_DEVICE int round_of(uint32_t n) {
  return int(n / kSize % 2);
}

// Position in a ring of kSize buffers, and its round.
template <int kSize>
struct Ring {
  int stage = 0, round = 0;  // round: modulo 2; the parity of the barrier's phase

  // The buffer that was used last.
  CUTE_DEVICE int last() const { return (stage == 0 ? kSize : stage) - 1; }
  CUTE_DEVICE void advance() {
    if (++stage == kSize) {
      stage = 0;
      round ^= 1;
    }
  }
};

}  // namespace cutlass_attn::sm90
