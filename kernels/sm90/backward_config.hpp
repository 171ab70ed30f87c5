// Tile shapes and shared memory of the wgmma backward kernel.
#pragma once

#include <cutlass/numeric_types.h>

#include "arch/mbarrier.hpp"
#include "core/opaque.hpp"
#include "core/traits.hpp"
#include "sm90/backward_params.hpp"
#include "sm90/config.hpp"
#include "tile/backward_block.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm90 {

// A step of a kernel with a mask. The producer reads the map and publishes the step in shared
// memory.
struct alignas(16) MapStep {
  int32_t number;      // index of the tile of queries in the workspace
  int32_t bits;        // index of the tile in the map; -1: every query sees every key
  int32_t head, tile;  // as in BackwardSteps
};
inline constexpr int kMapSteps = 8;  // ring of the latest steps

// kWarps consumer warps form warpgroups of four, with 64 keys each. One more warpgroup multiplies
// dQ; it contains the producer warp if registers do not suffice for a separate producer.
template <class Traits>
struct BackwardConfig {
  using Element = typename Traits::Element;
  using SeqInfo = typename Traits::SeqInfo;
  static constexpr bool kIsVarlen = !Traits::kIsDense;
  static constexpr bool kIsOrdered = Traits::kIsOrdered, kHasMask = Traits::kHasMask;
  static_assert(!kHasMask || !(kIsVarlen || kIsOrdered));
  // Whether the call has dropout, or a bias. Other blocks compute the gradient of a bias.
  static constexpr bool kDrops = Traits::kDrops, kMayDrop = kDrops;
  static constexpr bool kHasBias = Traits::kHasBias, kHasBiasGrad = false;
  using Dense =
      std::conditional_t<kHasMask,
                         std::conditional_t<kHasBias, BiasMaskBackwardParams, MaskBackwardParams>,
                         std::conditional_t<kHasBias, BiasBackwardParams, BackwardParams>>;
  using Params = std::conditional_t<kIsVarlen, VarlenBackwardParams, Dense>;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static_assert(Traits::kHeadDimV == kHeadDim && Traits::kWarpsN == 1);
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static constexpr int kGroups = Traits::kWarps / 4, kGroupThreads = 128;
  static constexpr int kComputeThreads = kGroups * kGroupThreads;
  static constexpr bool kCopiesApart = kGroups == 2;
  static constexpr int kFirstKeysGroup = 1 + kCopiesApart;
  static constexpr int kThreads = kFirstKeysGroup * kGroupThreads + kComputeThreads;
  // Whether a block takes tile of keys after tile of keys, so that copies and the beginning of the
  // next tile overlap the end of this one.
  static constexpr bool kIsPersistent = kCopiesApart && !kIsOrdered && !Traits::kHasBiasGrad;
  static constexpr int kKeyTiles = kIsPersistent ? 2 : 1;  // in shared memory
  static constexpr int kCopyRegisters = 24, kGradQRegisters = kCopiesApart ? 72 : 80;
  static constexpr int kKeysRegisters = kCopiesApart ? 208 : 144;
  static_assert((kGroups == 2 || kGroups == 3) && kBlockN == 64 * kGroups &&
                kBlockM % BackwardParams::kBlockM == 0);
  // Tiles of the workspace, of 64 queries each, in a step.
  static constexpr int kTiles = kBlockM / BackwardParams::kBlockM;
  static_assert(kTiles == 1 || !(kIsOrdered || kHasMask || kHasBias),
                "turns, the map of a mask and tiles of a bias are of 64 queries");
  static_assert(kHeadDim == 64 || kHeadDim == 128);

  // Traits required by BackwardProducts and BackwardScores: slices are whole tiles.
  static constexpr bool kIsGeneral = false;
  static constexpr int kWarpsN = Traits::kWarps, kWarpKeys = 16, kKeyBlocks = 1, kSlice = kBlockM;
  static constexpr int kSteps = kHeadDim / 16, kStationary = 0;

  using TileKv = SwizzledTile<kBlockN, kHeadDim>;
  using TileQ = SwizzledTile<kBlockM, kHeadDim>;  // of Q and of dO
  using TileS = SwizzledTile<kBlockN, kBlockM>;   // of dS: (key, query)
  // Bias of a warpgroup's keys: (query, key). It arrives in the buffer that these keys' dS takes
  // later in the step.
  using TileBias = SwizzledTile<kBlockM, 64>;
  static_assert(!kHasBias || kGroups * TileBias::kBytes == TileS::kBytes);
  static constexpr int kStages = kCopiesApart ? 2 : 3;

  // A tile of keys. `exists` is 0 if none is left.
  struct KeyTile : BackwardBlock<SeqInfo, kWarpsN> {
    int32_t exists, num_steps;
    alignas(16) int32_t queries_of_key[kBlockN][2];  // that see the key: [from, to)
  };
  struct MaskedKeyTile : KeyTile {
    MapStep steps[kMapSteps];
  };
  // Consumers are at most kStages steps ahead of dQ, and copies kStages ahead of consumers.
  static_assert(kMapSteps >= 2 * kStages);

  struct SharedStorage {
    alignas(1024) char k[kKeyTiles][TileKv::kBytes];
    char v[TileKv::kBytes];
    char q[kStages][TileQ::kBytes];
    char grad_o[kStages][TileQ::kBytes];
    char grad_s[kStages][TileS::kBytes];
    alignas(16) float stats[kStages][kBlockM][2];  // -LSE in log2, delta
    std::conditional_t<kHasMask, MaskedKeyTile, KeyTile> tiles[kKeyTiles];
    // For each consumer thread: P for dS, if it differs from P for dV.
    alignas(16) uint32_t weights[kBlockM / 16][kComputeThreads][4];
    // Full: the copy has landed (K with the KeyTile, Q with the statistics), or dS is stored.
    // Empty: all readers have released K and the KeyTile, V, Q with dO and the statistics, or dS.
    arch::Barrier tile_full[kKeyTiles], tile_empty[kKeyTiles], v_full, v_empty, q_full[kStages],
        grad_o_full[kStages], empty[kStages], grad_s_full[kStages], grad_s_empty[kStages];
  };
};

// Iterates over the tiles of queries of all query heads that read a KV head. If dQ is added in
// order, it goes from the last tile to the first: under a causal mask the last queries see the keys
// of most blocks, and blocks would wait for each other at the beginning.
template <class Config>
struct BackwardSteps {
  int head, tile, number = 0;

  CUTE_DEVICE BackwardSteps const& present() const { return *this; }

  template <class Block>
  CUTE_DEVICE BackwardSteps(typename Config::Params const& params, Block const& block)
      : head(block.tile.head * params.heads_per_kv), tile(first(block.range)) {}

  CUTE_DEVICE void advance(TileRange const& range) {
    ++number;
    tile += Config::kIsOrdered ? -1 : 1;
    if (Config::kIsOrdered ? tile < range.begin : tile == range.end) {
      tile = first(range);
      ++head;
    }
  }

  // Index of the step's first tile in the workspace.
  CUTE_DEVICE int64_t number_of(typename Config::Params const& params, int batch) const {
    return params.queries.template number<MmaBackwardParams::kTileRows, Config::kIsVarlen>(
        params.problem.seq_q, {batch, head, tile * Config::kBlockM});
  }

 private:
  CUTE_DEVICE static int first(TileRange const& range) {
    return Config::kIsOrdered ? range.end - 1 : range.begin;
  }
};

// Steps of a kernel with a mask, as published by the producer.
struct PublishedSteps {
  MapStep const* steps;
  int number = 0;

  template <class Params, class Block>
  CUTE_DEVICE PublishedSteps(Params const&, Block const& block) : steps(block.steps) {}
  CUTE_DEVICE void advance(TileRange const&) { ++number; }
  CUTE_DEVICE MapStep const& present() const { return steps[number % kMapSteps]; }
  template <class Params>
  CUTE_DEVICE int64_t number_of(Params const&, int) const {
    return present().number;
  }
};

// Whether the i-th tile of the workspace in a step has any query. The last step of a head may have
// fewer tiles. query_tile: index of the step's queries, in tiles of kBlockM.
template <class Config, class Block>
CUTE_DEVICE bool has_tile(typename Config::Params const& params, Block const& block, int query_tile,
                          int i) {
  int const first_query = query_tile * Config::kBlockM + i * BackwardParams::kBlockM;
  return i == 0 || first_query < block.seq.lens(params.problem).q;
}

// Iterator of the consumers and of the dQ warpgroup.
template <class Config>
using StepsOf = std::conditional_t<Config::kHasMask, PublishedSteps, BackwardSteps<Config>>;

// Copies a tile that begins at `row`, in boxes of 64 rows and 64 columns. Called by one thread.
template <class Tile, class Arch, class Rows>
CUTE_DEVICE void copy_boxes(Rows const& from, char* to, arch::Barrier* full, int row, int head,
                            SequenceRows const& of) {
  CUTE_UNROLL
  for (int c = 0; c < Tile::kChunks; ++c) {
    CUTE_UNROLL
    for (int i = 0; i < Tile::kRows; i += 64) {
      from.template load<Arch>(to + c * Tile::kChunkBytes + i * Tile::kRowBytes, full, c * 64,
                               row + i, head, of);
    }
  }
}

// One arrival per warp at a barrier, once all lanes are done. Called by all lanes.
template <class Arch>
CUTE_DEVICE void arrive(arch::Barrier* barrier) {
  Arch::sync_warp();
  if (opaque(Arch::thread()) % 32 == 0) Arch::mbarrier_arrive(barrier);
}

// An accumulator as an argument of wgmma.
template <class Fragment>
CUTE_DEVICE auto& registers_of(Fragment& fragment) {
  return fragment.x;
}

}  // namespace cutlass_attn::sm90
