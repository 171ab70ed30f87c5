// Tile shapes, shared memory and the tensor-core layout of the mma.sync forward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "core/dropout.hpp"
#include "core/e4m3.hpp"
#include "core/mask.hpp"
#include "core/quantize.hpp"
#include "core/scheduler.hpp"
#include "core/terms/alibi.hpp"
#include "tile/fragment.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm80 {

// kWarpsM warps along M have m16 blocks of rows in turn. kWarpsN warps along N share the rows: each
// has a share of a tile's keys for S, and of the head-dim columns for O.
// QkAccumulator, PvAccumulator: what Q K^T and P V are accumulated in, float or cutlass::half_t;
// Q K^T also in int32_t: then Q and K are rounded to int8 (core/quantize.hpp), K before the kernel;
// with that P V, too, in which case V is, and P to 8 bits without a sign, or, with cutlass::half_t,
// V and P to e4m3.
// kLayout: how many rows sequences have, and where those of K and V are.
// Kv: what K and V are stored as: Element, or E4M3 (products_fp8.hpp).
// kDrops: whether weights are dropped, with another score than the general one, which may always.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarpsM_,
          int kWarpsN_ = 1, class QkAccumulator_ = float, class PvAccumulator_ = float,
          RowLayout kLayout_ = RowLayout::kDense, class Kv_ = Element_, bool kDrops_ = false>
struct Config {
  static constexpr bool kDrops = kDrops_;
  static constexpr RowLayout kLayout = kLayout_;
  static constexpr bool kIsDense = kLayout == RowLayout::kDense,
                        kIsPaged = kLayout == RowLayout::kPaged;
  using Coord = BasicTileCoord<std::conditional_t<kIsDense, DenseSeqInfo, VarlenSeqInfo>>;
  using Element = Element_;
  using Kv = Kv_;
  static constexpr bool kIsFp8 = std::is_same_v<Kv, E4M3>;
  using QkAccumulator = QkAccumulator_;
  using PvAccumulator = PvAccumulator_;
  static constexpr bool kIsInt8 = std::is_same_v<QkAccumulator, int32_t>;
  // P and V in 8 bits: of int8, or of e4m3.
  static constexpr bool kIsInt8V = std::is_same_v<PvAccumulator, int32_t>;
  static constexpr bool kIsE4m3V = kIsInt8 && std::is_same_v<PvAccumulator, cutlass::half_t>;
  static constexpr bool kIs8BitV = kIsInt8V || kIsE4m3V;
  // Whether, with the general score, there are calls whose operands 16 bytes at a time do not suit.
  static constexpr bool kMayBeUnaligned = kIsDense || kIsInt8;
  // Whether tiles of keys come last to first: with P V in e4m3 (core/quantize.hpp), and with ALiBi,
  // which has the largest logits of a causal call in its last keys. First to last, steep slopes
  // would have the row max updated in every key block.
  template <class Score>
  static constexpr bool is_reversed() {
    return kIsE4m3V || Score::kHasAlibi;
  }
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kRowBlocks = kBlockM / kWarpsM / 16;  // m16 blocks of a warp
  static constexpr int kRows = 2 * kRowBlocks;               // rows of a thread
  static constexpr int kWarpColumns = kHeadDimV / kWarpsN;   // of O
  static_assert(kBlockM % (16 * kWarpsM) == 0 && kBlockN % 16 == 0);

  using TileQ = SwizzledTile<kBlockM, kHeadDim>;
  // Of numbers of 8 bits two are an element to the tile, to copies and to ldmatrix.
  using TileK = SwizzledTile<kBlockN, kHeadDim / (kIsFp8 || kIsInt8 ? 2 : 1)>;
  // V in 8 bits of this kernel's own has two keys for an element, and half as many rows.
  using TileV = SwizzledTile<kBlockN / (kIs8BitV ? 2 : 1), kHeadDimV / (kIsFp8 ? 2 : 1)>;
  using TileO = SwizzledTile<kBlockM, kHeadDimV>;
  using TileP = SwizzledTile<16 * kRowBlocks, kBlockN>;  // of the warps that share rows
  using Place = FragmentPlace<kWarpsM, kWarpsN>;

  // What Q K^T and P V lack where K and V are stored as multiples of a scale, which none but calls
  // with sequences of their own have.
  CUTE_DEVICE static float qk_factor(Problem const& p, int head_kv) {
    return kIsDense ? 1.0f : scale_of(p.k, head_kv);
  }
  CUTE_DEVICE static float pv_factor(Problem const& p, int head_kv) {
    return kIsDense ? 1.0f : scale_of(p.v, head_kv);
  }

  // Which schedule. Q stays in registers where it takes at most 32 of them, in int8 where it and O
  // take at most 128; then K and V have two buffers each. With P V in 8 bits, S of a whole tile has
  // them.
  static constexpr bool kIsSplit = kWarpsN > 1;
  static constexpr int kSteps = kHeadDim / (kIsInt8 ? 32 : 16);  // of Q K^T
  static constexpr int kQAndO = kRowBlocks * (kSteps * 4 + kHeadDimV / 2);
  static constexpr bool kKeepsQ =
      !kIsSplit && !kIs8BitV && (kIsInt8 ? kQAndO <= 128 : kRowBlocks * kSteps * 4 <= 32);
  // Keys of a tile that have the same scales, and how many times that.
  static constexpr int kScaleKeys = kBlockN < quantize::kTileKeys ? kBlockN : quantize::kTileKeys;
  static constexpr int kScaleTiles = kBlockN / kScaleKeys;
  static_assert(!kIsInt8 || (!kIsSplit && !kIsPaged && kBlockN % kScaleKeys == 0 &&
                             quantize::kTileKeys % kScaleKeys == 0));
  static_assert(!kIs8BitV || (kIsInt8 && kBlockN == quantize::kTileKeys),
                "weights are rounded with what a row has of a tile");
  // P V in 8 bits leaves room for two buffers in shared memory, too, up to a head_dim of 128.
  static constexpr bool kHasTwo8BitTiles = kIsInt8V && TileK::kBytes + TileV::kBytes <= 16 * 1024;
  static constexpr int kStages = kKeepsQ || kHasTwo8BitTiles ? 2 : 1;
  // Where scales of keys are, of as many tiles as they may be there of.
  static constexpr int kScalePlaces = kIs8BitV ? kStages : 2 * kScaleTiles;
  CUTE_DEVICE static int place_of_scales(int key) {
    return int(unsigned(key) / kScaleKeys % kScalePlaces);
  }

  // Whether O and S of a whole tile leave few registers for anything else. P V in two levels takes
  // some, and so do the scales of int8.
  static constexpr bool kIsTight =
      !kKeepsQ && !kIsSplit &&
      kRowBlocks * (kHeadDimV + kBlockN) >=
          (std::is_same_v<PvAccumulator, float> && !kIsInt8 ? 384 : 320);

  // Keys that go through softmax, and meet V, at a time: the more, the fewer branches and the more
  // registers, of which softcap needs some itself.
  template <class Score>
  static constexpr int key_block() {
    if (kIsSplit) return kBlockN / kWarpsN;
    // With 32 keys softcap at d128 has 48 bytes of local memory.
    if (kIsE4m3V && kRowBlocks > 1 && (Score::kIsIdentity || !kIsTight)) return 32;
    // With 64 keys d128 128x64x4 has a hundred instructions more in the loop, for local memory.
    if (kIsInt8V && kRowBlocks > 1 && kIsTight && !Score::kIsGeneral) return 32;
    if (kIs8BitV) return kBlockN;
    if (kIsInt8 && kQAndO > (kMinBlocksPerSm == 3 ? 64 : 96)) return 16;
    return kKeepsQ && kBlockN % 64 == 0 && (Score::kIsIdentity || Score::kIsGeneral) ? 32 : 16;
  }

  // Bound for the sum of a thread's weights in a key block. With fp16 accumulation, P V of a key
  // block has to stay below 65504: with 16 for each of the four threads that share a row it does as
  // long as no |V| exceeds 1023. (Less than 8 is impossible: so many weights may be 1.)
  static constexpr int kMaxWeightSum = std::is_same_v<PvAccumulator, cutlass::half_t> ? 16 : 4096;

  // Two blocks per SM for 32 rows a warp, with up to 255 registers; half as many rows get by with
  // 168 registers while the head dimension is small. So does Q in int8, which takes half of the
  // registers: at a head_dim of 128, and with 32 rows a warp in tiles of 128 keys, which are for
  // GPUs with shared memory for three of them.
  static constexpr bool kIsSmall =
      kRowBlocks == 1 && kHeadDim <= 64 && kHeadDimV <= 64 && !kIsPaged;
  static constexpr bool kIsSmallInInt8 =
      kIsInt8 && kKeepsQ && kQAndO <= 80 && (kRowBlocks == 1 || kBlockN == 128);
  static constexpr int kMinBlocksPerSm = kIsSplit ? 1 : kIsSmall || kIsSmallInInt8 ? 3 : 2;
  // P V in int8 gets by with 128 registers then, unless the score has options: four warps for a
  // scheduler instead of three are 6 % on an H100.
  template <class Score>
  static constexpr int min_blocks_per_sm() {
    return kIsInt8V && kIsSmall && !Score::kIsGeneral ? 4 : kMinBlocksPerSm;
  }

  // A warp's rows of S or O.
  template <class Accumulator, int kColumns>
  using Fragment = cutlass_attn::Fragment<Accumulator, kRowBlocks, kColumns / 8>;

  // How many columns of Q stay in registers where several warps share a row, in steps of 16; only
  // the others are read from shared memory, in every tile. With O they take up to 160 registers;
  // the general score, which holds more values of its own, leaves room for fewer.
  static constexpr int q_steps_kept(bool is_general) {
    int const budget = is_general ? 144 : 160;
    int const steps = (budget - kRowBlocks * (kWarpColumns / 8) * 4) / (kRowBlocks * 4);
    return steps < kHeadDim / 16 ? steps : kHeadDim / 16;
  }
  static constexpr int kMovedBytes = q_steps_kept(true) / 4 * TileQ::kChunkBytes;

  // What the threads of a block have in common beside the operands. Here, because registers are
  // what the main loop is short of.
  struct Pages {
    Kv const *k, *v;       // row 0 of the head, or of its part of page 0
    int32_t const* pages;  // of the batch entry; null: there are none
    FastDivisor by_page;
    Kv const* rows[kBlockN];  // what is copied next, for each warp by itself: paged_rows.hpp
  };
  struct NoPages {};
  struct Scales {
    // Of two tiles of K, in turn: that in softmax and the next. Where V has scales, those of a tile
    // are there as long as its K.
    using OfTile = std::conditional_t<
        kIsInt8V, quantize::KeyValueScales,
        std::conditional_t<kIsE4m3V, quantize::KeyFp8Scales, quantize::KeyScales>>;
    OfTile scales[kScalePlaces];
    // kMagic, four times for each lane of a quad: what sums begin with. From here it comes to
    // registers. What the compiler knows to be a constant, or the same for all lanes, it sets the
    // four of each m16n8 block to anew, which is 64 instructions a tile at d64.
    alignas(16) uint32_t start[4][4];
    float q_scale[kBlockM];  // of the rows
    float q_shift[kBlockM];  // Q . shift of the rows
    // Of the KV head, in global memory.
    OfTile const* all_scales;
    float const* shift;
  };
  struct NoScales {};
  struct BlockInfo : std::conditional_t<kIsPaged, Pages, NoPages>,
                     std::conditional_t<kIsInt8, Scales, NoScales> {
    Coord tile;
    TileRange range;    // of the tiles of keys that its queries touch, in keys
    NearMask interval;  // of the queries from the tile's first on
    union {
      DropoutMask dropout;  // with the general score, or kDrops
      Alibi::Tile alibi;    // with a score that has ALiBi
    };
  };

  // O of the block takes the place of Q, and then of K and V, once nobody reads them any more.
  struct WholeRowStorage {
    alignas(128) char q[TileQ::kBytes];  // first: O begins here
    alignas(128) char k[kStages][TileK::kBytes];
    alignas(128) char v[kStages][TileV::kBytes];
    BlockInfo block;
  };

  CUTE_HOST_DEVICE static constexpr int larger_of(int a, int b) { return a > b ? a : b; }

  // Q in int8 leaves its place to the second buffers as soon as it is in registers. O begins at k.
  struct ReusedStorage {
    alignas(128) char k[TileK::kBytes];
    alignas(128) char v[TileV::kBytes];
    alignas(128) char q[larger_of(larger_of(TileQ::kBytes, TileK::kBytes + TileV::kBytes),
                                  TileO::kBytes - TileK::kBytes - TileV::kBytes)];
    BlockInfo block;
  };

  // Where Q in int8 has no room in registers: it is written back to half of its place, and the
  // rest has V, or the second buffers. O begins at k.
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

  // Q comes in across the end of V: the first chunks, which move on to registers before there is a
  // V, are in V's place, the others behind it. O takes the place of K, and then of V, once nobody
  // reads them any more; so does the exchange of row sums.
  struct SplitStorage {
    alignas(128) char k[1][TileK::kBytes];
    alignas(128) char v[1][TileV::kBytes];
    alignas(128) char q_and_p[TileQ::kBytes - kMovedBytes + kWarpsM * TileP::kBytes];
    // The tile of keys in which a warp last found a weight too large, by its first key.
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
  // From a buffer of K, or of V, to the next; from K's first to V's.
  static constexpr int kInt8Stride =
      TileK::kBytes + TileV::kBytes + (kHasTwo8BitTiles ? TileQ8::kBytes : 0);
  static constexpr int kKStride = kIsInt8 ? kInt8Stride : TileK::kBytes;
  static constexpr int kVStride = kIsInt8 ? kInt8Stride : TileV::kBytes;
  static constexpr int kVOffset = !kIsInt8      ? kStages * TileK::kBytes
                                  : kQIsBehindV ? TileK::kBytes
                                                : TileK::kBytes + TileQ8::kBytes;
  static constexpr int kBufferBytes =
      kIsSplit ? TileK::kBytes + TileV::kBytes
               : TileQ::kBytes + kStages * (TileK::kBytes + TileV::kBytes);
  static_assert(kIsInt8 || TileO::kBytes <= kBufferBytes);
  static_assert(!kIsFp8 || (!kIsSplit && !kIsInt8));
  static_assert(kIsSplit || (kHeadDim % 32 == 0 && kHeadDimV % 32 == 0));
  static_assert(!kIsSplit || (kHeadDim % 64 == 0 && kHeadDimV % (64 * kWarpsN) == 0),
                "so that a warp's columns of V are chunks");
  static_assert(!kIsSplit || kBlockN / kWarpsN == 8,
                "so that an ldmatrix of K brings 8 keys x 32 columns");
  static_assert(!kIsInt8 || kIs8BitV || std::is_same_v<PvAccumulator, float>);
  static_assert(!kIsSplit || kMovedBytes <= TileV::kBytes);
  static_assert(!kIsSplit ||
                    (std::is_same_v<QkAccumulator, float> && std::is_same_v<PvAccumulator, float>),
                "the split schedule accumulates in fp32 alone");
};

}  // namespace cutlass_attn::sm80
