// Tile shapes, shared memory and the tensor-core layout of the mma.sync forward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "core/dropout.hpp"
#include "core/e4m3.hpp"
#include "core/key_tiles.hpp"
#include "core/mask.hpp"
#include "core/quantize.hpp"
#include "core/scheduler.hpp"
#include "core/terms/alibi.hpp"
#include "core/traits.hpp"
#include "sm80/tile_facts.hpp"
#include "tile/fragment.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm80 {

// kWarpsM warps along M take m16 blocks of rows in turn. kWarpsN warps along N share the rows: each
// computes S for a share of a tile's keys, and O for a share of the head-dim columns.
// Accumulators are float or cutlass::half_t. Qk = int32_t: Q and K are rounded to int8
// (core/quantize.hpp), K before the kernel. Pv = int32_t then rounds V to int8 and P to uint8;
// cutlass::half_t rounds V and P to e4m3.
template <class Traits>
struct Config {
  static constexpr bool kDrops = Traits::kDrops;
  static constexpr bool kHasBias = Traits::kHasBias, kHasMask = Traits::kHasMask;
  static constexpr bool kIsDense = Traits::kIsDense, kIsPaged = Traits::kIsPaged;
  using Coord = BasicTileCoord<typename Traits::SeqInfo>;
  using Element = typename Traits::Element;
  using Kv = typename Traits::Kv;  // in which K and V are stored; E4M3: tile/products_fp8.hpp
  static constexpr bool kIsFp8 = Traits::kIsFp8;
  using QkAccumulator = typename Traits::Accumulators::Qk;
  using PvAccumulator = typename Traits::Accumulators::Pv;
  static constexpr bool kIsInt8 = std::is_same_v<QkAccumulator, int32_t>;
  // P and V in 8 bits: int8, or e4m3.
  static constexpr bool kIsInt8V = std::is_same_v<PvAccumulator, int32_t>;
  static constexpr bool kIsE4m3V = kIsInt8 && std::is_same_v<PvAccumulator, cutlass::half_t>;
  static constexpr bool kIs8BitV = kIsInt8V || kIsE4m3V;
  // For the general score: whether operands of a call may be unaligned to 16 bytes.
  static constexpr bool kMayBeUnaligned = kIsDense || kIsInt8;
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
  static constexpr TileFacts kFacts = {kHeadDim, kHeadDimV, kBlockM, kBlockN,  kWarpsM, kWarpsN,
                                       kIsPaged, kIsFp8,    kIsInt8, kIsInt8V, kIsE4m3V};
  static constexpr int kThreads = kFacts.threads();
  static constexpr int kRowBlocks = kFacts.row_blocks();  // m16 blocks per warp
  static constexpr int kRows = 2 * kRowBlocks;            // rows per thread
  static constexpr int kWarpColumns = kFacts.warp_columns();

  using TileQ = SwizzledTile<kBlockM, kHeadDim>;
  // Two 8-bit numbers count as one element of the tile, for copies and ldmatrix.
  using TileK = SwizzledTile<kBlockN, kHeadDim / (kIsFp8 || kIsInt8 ? 2 : 1)>;
  // V that this kernel reads in 8 bits has two keys per element, and so half as many rows.
  using TileV = SwizzledTile<kBlockN / (kIs8BitV ? 2 : 1), kHeadDimV / (kIsFp8 ? 2 : 1)>;
  using TileO = SwizzledTile<kBlockM, kHeadDimV>;
  using TileP = SwizzledTile<16 * kRowBlocks, kBlockN>;  // shared by warps along N
  using Place = FragmentPlace<kWarpsM, kWarpsN>;

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
  // Keys of a tile that share scales, and the number of these groups in a tile.
  static constexpr int kScaleKeys = kBlockN < quantize::kTileKeys ? kBlockN : quantize::kTileKeys;
  static constexpr int kScaleTiles = kBlockN / kScaleKeys;
  static_assert(!kIsInt8 || (!kIsSplit && !kIsPaged));
  static_assert(!kIs8BitV || kIsInt8);
  static constexpr bool kHasTwo8BitTiles = kFacts.has_two_8_bit_tiles();
  static constexpr int kStages = kFacts.stages();
  // Buffers for scales of keys: one for each tile that may be in shared memory.
  static constexpr int kScalePlaces = kIs8BitV ? kStages : 2 * kScaleTiles;
  CUTE_DEVICE static int place_of_scales(int key) {
    return int(unsigned(key) / kScaleKeys % kScalePlaces);
  }

  // Whether O and S of a whole tile leave few registers. P V in two levels, and the scales of int8,
  // take some of them.
  static constexpr bool kIsTight =
      !kKeepsQ && !kIsSplit &&
      kRowBlocks * (kHeadDimV + kBlockN) >=
          (std::is_same_v<PvAccumulator, float> && !kIsInt8 ? 384 : 320);

  // Keys that go through softmax and P V at a time. More keys mean fewer branches but more
  // registers, and softcap needs registers too.
  template <class Score>
  static constexpr int key_block() {
    if (kIsSplit) return kBlockN / kWarpsN;
    // With 32 keys, softcap at d128 has 48 bytes of local memory.
    if (kIsE4m3V && kRowBlocks > 1 && (Score::kIsIdentity || !kIsTight)) return 32;
    // With 64 keys, d128 128x64x4 has a hundred more instructions in the loop, for local memory.
    if (kIsInt8V && kRowBlocks > 1 && kIsTight && !Score::kIsGeneral) return 32;
    if (kIs8BitV) return kBlockN;
    if (kIsInt8 && kFacts.q_and_o() > (kMinBlocksPerSm == 3 ? 64 : 96)) return 16;
    return kKeepsQ && kBlockN % 64 == 0 && (Score::kIsIdentity || Score::kIsGeneral) ? 32 : 16;
  }

  // Bound of the sum of a thread's weights in a key block. With fp16 accumulation, P V of a key
  // block has to stay below 65504. Four threads share a row, so with a bound of 16 each it does as
  // long as no |V| exceeds 1023. (A bound below 8 is impossible: 8 weights of a thread may be 1.)
  static constexpr int kMaxWeightSum =
      std::is_same_v<PvAccumulator, cutlass::half_t> && !kIsInt8 ? 16 : 4096;

  static constexpr int kMinBlocksPerSm = kFacts.min_blocks_per_sm();
  // P V in int8 with 16 rows per warp and a small head dim fits 128 registers, unless the score has
  // options: four warps per scheduler instead of three are 6 % faster on an H100.
  template <class Score>
  static constexpr int min_blocks_per_sm() {
    return kIsInt8V && kFacts.is_small() && !Score::kIsGeneral ? 4 : kMinBlocksPerSm;
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
  struct Scales {
    // Scales of two tiles of K, alternating: the tile in softmax and the next one. Scales of V stay
    // as long as those of K.
    using OfTile = std::conditional_t<
        kIsInt8V, quantize::KeyValueScales,
        std::conditional_t<kIsE4m3V, quantize::KeyFp8Scales, quantize::KeyScales>>;
    OfTile scales[kScalePlaces];
    // kMagic, four times for each lane of a quad: the initial value of int32 accumulators. Threads
    // load it from here. If the compiler knew that it is constant, or uniform over lanes, it would
    // set the four registers of each m16n8 block again for every tile: 64 instructions per tile at
    // d64.
    alignas(16) uint32_t start[4][4];
    float q_scale[kBlockM];  // per row
    float q_shift[kBlockM];  // Q . shift per row
    // Arrays of the KV head in global memory.
    OfTile const* all_scales;
    float const* shift;
  };
  struct NoScales {};
  struct Bias {
    uint16_t const* bias[kBlockM];  // per row, address of key 0
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
  struct BlockInfo : std::conditional_t<kIsPaged, Pages, NoPages>,
                     std::conditional_t<kIsInt8, Scales, NoScales>,
                     std::conditional_t<kHasBias, Bias, NoBias>,
                     std::conditional_t<kHasMask, MapRow, NoMapRow> {
    Coord tile;
    TileRange range;    // key tiles that the tile's queries see, in keys
    TileMask interval;  // for queries from the tile's first on
    KeyRange keys;      // that any of the tile's queries sees
    union {
      DropoutMask dropout;  // with the general score, or kDrops
      Alibi::Tile alibi;    // with a score that has ALiBi
    };
  };

  // At the end, O of the block overwrites Q, then K and V.
  struct WholeRowStorage {
    alignas(128) char q[TileQ::kBytes];  // first: O begins here
    alignas(128) char k[kStages][TileK::kBytes];
    alignas(128) char v[kStages][TileV::kBytes];
    BlockInfo block;
  };

  CUTE_HOST_DEVICE static constexpr int larger_of(int a, int b) { return a > b ? a : b; }

  // The second stages overwrite Q once Q, in int8, is in registers. O begins at k.
  struct ReusedStorage {
    alignas(128) char k[TileK::kBytes];
    alignas(128) char v[TileV::kBytes];
    alignas(128) char q[larger_of(larger_of(TileQ::kBytes, TileK::kBytes + TileV::kBytes),
                                  TileO::kBytes - TileK::kBytes - TileV::kBytes)];
    BlockInfo block;
  };

  // For Q in int8 that does not fit in registers: it is written back to half of its buffer, and the
  // other half holds V or the second stages. O begins at k.
  using TileQ8 = SwizzledTile<kBlockM, kHeadDim / 2>;
  struct HalvedStorage {
    alignas(128) char k[TileK::kBytes];
    alignas(128) char q8[TileQ8::kBytes];  // Q begins here
    alignas(128) char v[larger_of(larger_of(TileV::kBytes, TileQ::kBytes - TileQ8::kBytes),
                                  TileO::kBytes - TileK::kBytes - TileQ8::kBytes)];
    BlockInfo block;
  };
  struct HalvedTwiceStorage {
    static constexpr int kTiles = TileK::kBytes + TileV::kBytes;
    alignas(128) char k[TileK::kBytes];
    alignas(128) char v[TileV::kBytes];
    alignas(128) char q8[TileQ8::kBytes];  // Q begins here
    alignas(128) char second[larger_of(larger_of(kTiles, TileQ::kBytes - TileQ8::kBytes),
                                       TileO::kBytes - kTiles - TileQ8::kBytes)];
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

  using Int8Storage =
      std::conditional_t<kKeepsQ, ReusedStorage,
                         std::conditional_t<kHasTwo8BitTiles, HalvedTwiceStorage, HalvedStorage>>;
  using SharedStorage =
      std::conditional_t<kIsSplit, SplitStorage,
                         std::conditional_t<kIsInt8, Int8Storage, WholeRowStorage>>;
  static constexpr bool kQIsBehindV = kIsInt8 && kStages == 2;
  static constexpr int kQOffset = kIsSplit      ? TileK::kBytes + TileV::kBytes - kMovedBytes
                                  : !kIsInt8    ? 0
                                  : kQIsBehindV ? TileK::kBytes + TileV::kBytes
                                                : TileK::kBytes;
  // Bytes from one stage of K, or of V, to the next; and from the first stage of K to that of V.
  static constexpr int kInt8Stride =
      TileK::kBytes + TileV::kBytes + (kHasTwo8BitTiles ? TileQ8::kBytes : 0);
  static constexpr int kKStride = kIsInt8 ? kInt8Stride : TileK::kBytes;
  static constexpr int kVStride = kIsInt8 ? kInt8Stride : TileV::kBytes;
  static constexpr int kVOffset = !kIsInt8      ? kStages * TileK::kBytes
                                  : kQIsBehindV ? TileK::kBytes
                                                : TileK::kBytes + TileQ8::kBytes;
  static_assert(!(kHasBias || kHasMask) || (kIsDense && !kIsSplit && !kIsInt8));
  static_assert(!kIsFp8 || (!kIsSplit && !kIsInt8));
  static_assert(!kIsInt8 || kIs8BitV || std::is_same_v<PvAccumulator, float>);
  static_assert(!kIsSplit ||
                    (std::is_same_v<QkAccumulator, float> && std::is_same_v<PvAccumulator, float>),
                "the split schedule accumulates in fp32 only");
};

}  // namespace cutlass_attn::sm80
