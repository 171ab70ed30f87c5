// Tile shapes, shared memory and the tensor-core layout of the mma.sync forward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "core/dropout.hpp"
#include "core/e4m3.hpp"
#include "core/key_tiles.hpp"
#include "core/mask.hpp"
#include "core/scheduler.hpp"
#include "core/sequences.hpp"
#include "core/terms/alibi.hpp"
#include "core/traits.hpp"
#include "sm80/tile_facts.hpp"
#include "tile/fragment.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm80 {

// kWarpsM warps along M take m16 blocks of rows in turn. kWarpsN warps along N share the rows: each
// computes S for a share of a tile's keys, and O for a share of the head-dim columns.
// Accumulators are float or cutlass::half_t. quantized/config.hpp specialises it for products in 8
// bits.
template <class Traits, class ElementK_ = typename Traits::ElementK>
struct Config {
  static constexpr bool kDrops = Traits::kDrops;
  static constexpr bool kHasBias = Traits::kHasBias, kHasAnyBias = Traits::kHasAnyBias;
  static constexpr bool kHasMask = Traits::kHasMask;
  static constexpr bool kIsDense = Traits::kIsDense, kIsPaged = Traits::kIsPaged;
  using Coord = BasicTileCoord<typename Traits::SeqInfo>;
  using Element = typename Traits::Element;
  using Kv = typename Traits::Kv;  // in which K and V are stored; E4M3: tile/products_fp8.hpp
  using ElementK = typename Traits::ElementK;
  static constexpr bool kIsFp8 = Traits::kIsFp8;
  using QkAccumulator = typename Traits::Accumulators::Qk;
  using PvAccumulator = typename Traits::Accumulators::Pv;
  // For the general score: whether operands of a call may be unaligned to 16 bytes.
  static constexpr bool kMayBeUnaligned = kIsDense;
  // Whether key tiles go from last to first: with a mask map (core/key_tiles.hpp), and with ALiBi,
  // where the largest logits of a causal call are those of its last keys. From first to last, steep
  // slopes would update the row max in every key block.
  template <class Score>
  static constexpr bool is_reversed() {
    return kHasMask || Score::kHasAlibi;
  }
  static constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static constexpr int kWarpsM = Traits::kWarpsM, kWarpsN = Traits::kWarpsN;
  static constexpr TileFacts kFacts = {kHeadDim, kHeadDimV, kBlockM,  kBlockN,
                                       kWarpsM,  kWarpsN,   kIsPaged, kIsFp8};
  static constexpr int kThreads = kFacts.threads();
  static constexpr int kRowBlocks = kFacts.row_blocks();  // m16 blocks per warp
  static constexpr int kRows = 2 * kRowBlocks;            // rows per thread
  static constexpr int kWarpColumns = kFacts.warp_columns();

  using TileQ = SwizzledTile<kBlockM, kHeadDim>;
  // Two numbers of e4m3 count as one element of the tile, for copies and ldmatrix.
  using TileK = SwizzledTile<kBlockN, kHeadDim / (kIsFp8 ? 2 : 1)>;
  using TileV = SwizzledTile<kBlockN, kHeadDimV / (kIsFp8 ? 2 : 1)>;
  using TileO = SwizzledTile<kBlockM, kHeadDimV>;
  using TileP = SwizzledTile<16 * kRowBlocks, kBlockN>;  // shared by warps along N
  using Place = FragmentPlace<kWarpsM, kWarpsN>;
  // Rows of K and V in global memory, and the columns to copy of a row of K.
  using RowsK = DenseKv<Kv>;
  using RowsV = DenseKv<Kv>;
  CUTE_DEVICE static int k_columns(Problem const& p) { return p.head_dim; }

  // Factors of Q K^T and P V if K and V are stored divided by a scale, which only calls with
  // sequences of different lengths may have.
  CUTE_DEVICE static float qk_factor(Problem const& p, int head_kv) {
    return kIsDense ? 1.0f : scale_of(p.k, head_kv);
  }
  CUTE_DEVICE static float pv_factor(Problem const& p, int head_kv) {
    return kIsDense ? 1.0f : scale_of(p.v, head_kv);
  }

  static constexpr bool kIsSplit = kFacts.is_split();
  static constexpr bool kKeepsQ = kFacts.keeps_q();  // Q stays in registers
  static constexpr int kStages = kFacts.stages();
  // Whether O and S of a whole tile leave few registers. P V in two levels takes some of them.
  static constexpr bool kIsTight =
      !kKeepsQ && !kIsSplit &&
      kRowBlocks * (kHeadDimV + kBlockN) >= (std::is_same_v<PvAccumulator, float> ? 384 : 320);

  // Keys that go through softmax and P V at a time. More keys mean fewer branches but more
  // registers, and softcap needs registers too.
  template <class Score>
  static constexpr int key_block() {
    if (kIsSplit) return kBlockN / kWarpsN;
    return kKeepsQ && kBlockN % 64 == 0 && (Score::kIsIdentity || Score::kIsGeneral) ? 32 : 16;
  }

  // Bound of the sum of a thread's weights in a key block. With fp16 accumulation, P V of a key
  // block has to stay below 65504. Four threads share a row, so with a bound of 16 each it does as
  // long as no |V| exceeds 1023. (A bound below 8 is impossible: 8 weights of a thread may be 1.)
  static constexpr int kMaxWeightSum = std::is_same_v<PvAccumulator, cutlass::half_t> ? 16 : 4096;

  // A bias that is read an entry at a time takes the registers of a third block.
  static constexpr int kMinBlocksPerSm =
      kHasAnyBias && kFacts.is_small() ? 2 : kFacts.min_blocks_per_sm();
  template <class Score>
  static constexpr int min_blocks_per_sm() {
    return kMinBlocksPerSm;
  }

  // A warp's rows of S or O.
  template <class Accumulator, int kColumns>
  using Fragment = cutlass_attn::Fragment<Accumulator, kRowBlocks, kColumns / 8>;

  static constexpr int kMovedBytes = kFacts.moved_bytes();

  // Per-block state besides the operands. In shared memory, because the main loop has no registers
  // for it.
  struct Pages {
    Kv const *k, *v;       // row 0 of the head, or the head's part of page 0
    int32_t const* pages;  // block table of the batch entry; null: not paged
    FastDivisor by_page;
    Kv const* rows[kBlockN];  // rows that each warp copies next: paged_rows.hpp
  };
  struct NoPages {};
  struct Bias {
    char const* bias[kBlockM];  // per row, address of key 0
  };
  struct NoBias {};
  // Mask map of the tile of rows.
  struct MapRow {
    Kv const *k, *v;  // row 0 of the head
    MaskWord const* words;
    uint32_t const* all_bits;
    // Bits of the key tile in each stage, if the tile is partial.
    alignas(16) uint32_t bits[kStages][kBlockM][MaskMap::kLanes];
  };
  struct NoMapRow {};
  union OneTerm {
    DropoutMask dropout;  // with the general score
    Alibi::Tile alibi;    // with a score that has ALiBi
  };
  struct DropoutAndTerm {
    DropoutMask dropout;
    Alibi::Tile alibi;
  };
  struct BlockInfo : std::conditional_t<kIsPaged, Pages, NoPages>,
                     std::conditional_t<kHasBias, Bias, NoBias>,
                     std::conditional_t<kHasMask, MapRow, NoMapRow> {
    Coord tile;
    TileRange range;    // key tiles that the tile's queries see, in keys
    TileMask interval;  // for queries from the tile's first on
    KeyRange keys;      // that any of the tile's queries sees
    std::conditional_t<kDrops, DropoutAndTerm, OneTerm> terms;
  };

  // At the end, O of the block overwrites Q, then K and V.
  struct WholeRowStorage {
    alignas(128) char q[TileQ::kBytes];  // first: O begins here
    alignas(128) char k[kStages][TileK::kBytes];
    alignas(128) char v[kStages][TileV::kBytes];
    BlockInfo block;
  };

  // Q overlaps the end of V: its first chunks lie in V's buffer and move to registers before V is
  // copied; the other chunks lie behind V. At the end, O and the exchange of row sums overwrite K,
  // then V.
  struct SplitStorage {
    alignas(128) char k[1][TileK::kBytes];
    alignas(128) char v[1][TileV::kBytes];
    alignas(128) char q_and_p[TileQ::kBytes - kMovedBytes + kWarpsM * TileP::kBytes];
    // First key of the tile in which a warp last found too large a weight.
    int32_t large_at[kWarpsM][kWarpsN];
    BlockInfo block;

    CUTE_DEVICE char* p(int warp_m) {
      return q_and_p + (TileQ::kBytes - kMovedBytes) + warp_m * TileP::kBytes;
    }
  };

  using SharedStorage = std::conditional_t<kIsSplit, SplitStorage, WholeRowStorage>;
  static constexpr int kQOffset = kIsSplit ? TileK::kBytes + TileV::kBytes - kMovedBytes : 0;
  // Bytes from one stage of K, or of V, to the next; and from the first stage of K to that of V.
  static constexpr int kKStride = TileK::kBytes, kVStride = TileV::kBytes;
  static constexpr int kVOffset = kStages * TileK::kBytes;
  static_assert(!(kHasBias || kHasMask) || kIsDense);
  static_assert(!kIsFp8 || !kIsSplit);
  static_assert(!std::is_same_v<ElementK_, int8_t>, "this needs sm80/quantized/forward.hpp");
  static_assert(!kIsSplit ||
                    (std::is_same_v<QkAccumulator, float> && std::is_same_v<PvAccumulator, float>),
                "the split schedule accumulates in fp32 only");
};

}  // namespace cutlass_attn::sm80
