// Tile shapes and shared memory of the two-pass backward kernel.
#pragma once

#include <cutlass/numeric_types.h>

#include "arch/mbarrier.hpp"
#include "core/traits.hpp"
#include "sm90/backward_two_pass_params.hpp"
#include "sm90/config.hpp"
#include "tile/backward_block.hpp"
#include "tile/fragment.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm90 {

// Two consumer warpgroups, and one warpgroup with two producer warps.
template <class Traits>
struct TwoPassConfig {
  using Element = typename Traits::Element;
  using SeqInfo = typename Traits::SeqInfo;
  static constexpr bool kIsVarlen = !Traits::kIsDense;
  using Params = std::conditional_t<kIsVarlen, VarlenTwoPassParams, TwoPassParams>;
  static constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
  // kBlockM: queries per step of a block of keys. kBlockN: keys of a block of keys, and keys per
  // step of a block of queries.
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static constexpr int kBlockQueries = Params::kQueries;
  static constexpr int kGroups = Traits::kWarps / 4, kGroupThreads = 128;
  static constexpr int kThreads = (1 + kGroups) * kGroupThreads;
  static constexpr int kCopyRegisters = 24, kComputeRegisters = 240;
  static_assert(kGroups == 2 && kBlockQueries == 64 * kGroups);
  static_assert(kBlockM == Params::kStepRows && kBlockN == Params::kKeys && kBlockN == kBlockM);
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);
  static_assert(kHeadDim <= 256 && kHeadDimV <= 256, "accumulators of a warpgroup");

  // Tiles of 64 rows: of Q or K, and of dO or V.
  using TileQk = SwizzledTile<64, kHeadDim>;
  using TileV = SwizzledTile<64, kHeadDimV>;

  using Weights = Fragment<float, 1, 8>;  // S, P, dP or dS: 64 rows of a warpgroup x 64 columns
  using Packed = uint32_t[4][4];          // P or dS, rounded, as A of wgmma: four k16
  using GradQk = Fragment<float, 1, kHeadDim / 8>;
  using GradV = Fragment<float, 1, kHeadDimV / 8>;

  static constexpr int kMaxSmemBytes = 227 * 1024, kOtherBytes = 3072;
  static constexpr int kMaxStages = 4;
  // Number of stages, each a pair of tiles, that fit in shared memory next to other_bytes.
  static constexpr int stages(int other_bytes, int pair_bytes) {
    int const stages = (kMaxSmemBytes - kOtherBytes - other_bytes) / pair_bytes;
    return stages < kMaxStages ? stages : kMaxStages;
  }

  // --- A block of keys ---
  // P from the first warpgroup to the second: each thread writes words for the thread of equal
  // index.
  static constexpr int kPStages = 2, kPBytes = sizeof(Packed) * kGroupThreads;
  static constexpr int kQueryStages =
      stages(TileQk::kBytes + TileV::kBytes + kPStages * kPBytes + 2 * kMaxStages * kBlockM * 4,
             TileQk::kBytes + TileV::kBytes);
  static_assert(kQueryStages >= 2);
  struct KeysStorage {
    alignas(1024) char k[TileQk::kBytes];
    char v[TileV::kBytes];
    char q[kQueryStages][TileQk::kBytes];
    char grad_o[kQueryStages][TileV::kBytes];
    char p[kPStages][kPBytes];
    alignas(16) float neg_lse[kQueryStages][kBlockM];  // in units of log2
    alignas(16) float delta[kQueryStages][kBlockM];
    alignas(16) int32_t queries_of_key[kBlockN][2];  // that see the key: [from, to)
    BackwardBlock<SeqInfo, 4> block;
    // Full: the copy has landed (Q with -LSE, dO with delta), or P is stored. Empty: all readers
    // have released it.
    arch::Barrier k_full, v_full, q_full[kQueryStages], q_empty[kQueryStages],
        grad_o_full[kQueryStages], grad_o_empty[kQueryStages], p_full[kPStages], p_empty[kPStages];
  };

  // --- A block of queries ---
  // A step reads K until dQ is multiplied, but V only until dP is. If two stages of both do not
  // fit, K has two stages and V has one.
  static constexpr int kStationaryBytes = kGroups * (TileQk::kBytes + TileV::kBytes);
  static constexpr int kPairs = stages(kStationaryBytes, TileQk::kBytes + TileV::kBytes);
  static constexpr int kKStages = kPairs < 2 ? 2 : kPairs, kVStages = kPairs;
  struct QueriesStorage {
    alignas(1024) char q[kGroups][TileQk::kBytes];
    char grad_o[kGroups][TileV::kBytes];
    char k[kKStages][TileQk::kBytes];
    char v[kVStages][TileV::kBytes];
    alignas(16) int32_t keys_of_query[kBlockQueries][2];  // that it sees: [from, to)
    alignas(16) int32_t keys_of_all[4 * kGroups][2];      // that all queries of a warp see
    SeqInfo seq;
    RowTile tile;     // of queries
    TileRange range;  // key tiles that any of the queries sees
    arch::Barrier q_full, grad_o_full, k_full[kKStages], k_empty[kKStages], v_full[kVStages],
        v_empty[kVStages];
  };

  union SharedStorage {
    KeysStorage keys;
    QueriesStorage queries;
  };
  static constexpr int kSmemBytes = sizeof(KeysStorage) > sizeof(QueriesStorage)
                                        ? int(sizeof(KeysStorage))
                                        : int(sizeof(QueriesStorage));
  static_assert(kSmemBytes <= kMaxSmemBytes);

  // Traits required by share_visible(), BackwardSteps and the tests.
  static constexpr bool kIsOrdered = false, kHasBiasGrad = false;
  static constexpr int kWarpsN = 4, kWarpKeys = 16;
};

// Index of this thread in its warpgroup.
template <class Arch>
CUTE_DEVICE int thread_of_group() {
  return opaque(Arch::thread()) % 128;
}

// Products of a warpgroup's 64 rows.
template <class Config, class Arch>
struct TwoPassProducts {
  using Element = typename Config::Element;

  // x = A B^T, 64 rows each, over all columns of the tiles.
  template <class Tile>
  CUTE_DEVICE static void issue_first(char const* a_tile, char const* b_tile,
                                      typename Config::Weights& x) {
    auto const a = opaque(Arch::descriptor(a_tile, 16, 1024));
    auto const b = Arch::descriptor(b_tile, 16, 1024);
    Arch::wgmma_fence(x.x);
    CUTE_UNROLL
    for (int i = 0; i < Tile::kColumns / 16; ++i) {
      Arch::template wgmma_ss<Element>(x.x, a + column_step<Tile>(i), b + column_step<Tile>(i),
                                       i != 0);
    }
    Arch::wgmma_commit();
  }

  // grad += A B, with 64 rows of B per tile.
  template <class Tile, class Grad>
  CUTE_DEVICE static void issue_second(typename Config::Packed& words, char const* tile,
                                       Grad& grad) {
    auto const b = Arch::descriptor(tile, Tile::kChunkBytes, 1024);
    Arch::wgmma_fence(grad.x, words);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      Arch::template wgmma_rs<Element>(grad.x, words[i], b + i * 16 * Tile::kRowBytes / 16, true);
    }
    Arch::wgmma_commit();
  }

  CUTE_DEVICE static void pack(typename Config::Weights const& x, typename Config::Packed& words) {
    CUTE_UNROLL
    for (int n = 0; n < 4; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const at = i % 2 * 2;  // rows g and g + 8 of n8 blocks 2 n and 2 n + 1
        words[n][i] =
            Arch::template pack<Element>(x(at, 0, 2 * n + i / 2), x(at + 1, 0, 2 * n + i / 2));
      }
    }
  }
};

// Copies the tile that begins at `row` to a buffer. Called by the producer thread.
template <class Tile, class Arch, class Rows>
CUTE_DEVICE void load_tile(Rows const& from, char* to, arch::Barrier* full, int row, int head,
                           SequenceRows const& of) {
  CUTE_UNROLL
  for (int c = 0; c < Tile::kChunks; ++c) {
    from.template load<Arch>(to + c * Tile::kChunkBytes, full, c * 64, row, head, of);
  }
}

}  // namespace cutlass_attn::sm90
