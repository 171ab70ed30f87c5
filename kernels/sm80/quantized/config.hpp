// Tile shapes and shared memory of the mma.sync forward kernel with products in 8 bits.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "core/quantize.hpp"
#include "quantized/key_tiles.hpp"
#include "sm80/config.hpp"

namespace cutlass_attn::sm80 {

// Qk = int32_t: Q and K are rounded to int8 (core/quantize.hpp), K before the kernel. Pv = int32_t
// then rounds V to int8 and P to uint8; cutlass::half_t rounds V and P to e4m3. With float, P V is
// that of 16 bits.
template <class Traits>
struct Config<Traits, int8_t> : Config<Traits, typename Traits::Element> {
  using Base = Config<Traits, typename Traits::Element>;
  using Base::kBlockM, Base::kBlockN, Base::kHeadDim, Base::kHeadDimV, Base::kRowBlocks;
  using Base::kIsDense;
  using typename Base::Kv, typename Base::PvAccumulator;
  using typename Base::TileO, typename Base::TileQ;
  // P and V in 8 bits: int8, or e4m3.
  static constexpr bool kIsInt8V = std::is_same_v<PvAccumulator, int32_t>;
  static constexpr bool kIsE4m3V = std::is_same_v<PvAccumulator, cutlass::half_t>;
  static constexpr bool kIs8BitV = kIsInt8V || kIsE4m3V;
  static_assert(kIs8BitV || std::is_same_v<PvAccumulator, float>);
  static_assert(!Base::kIsSplit && !Base::kIsPaged && !Base::kIsFp8 && !Base::kHasBias &&
                !Base::kHasMask && !Traits::kSplitsKeys);
  static constexpr bool kMayBeUnaligned = true;
  static constexpr TileFacts kFacts = {kHeadDim,      kHeadDimV,     kBlockM, kBlockN,
                                       Base::kWarpsM, Base::kWarpsN, false,   false,
                                       true,          kIsInt8V,      kIsE4m3V};

  // Two 8-bit numbers count as one element of the tile, for copies and ldmatrix.
  using TileK = SwizzledTile<kBlockN, kHeadDim / 2>;
  // V in 8 bits has two keys per element, and so half as many rows.
  using TileV = SwizzledTile<kBlockN / (kIs8BitV ? 2 : 1), kHeadDimV>;
  // 8-bit rows of packed sequences lie in tiles of the workspace.
  template <bool kIs8Bit>
  using RowsOf = std::conditional_t<kIs8Bit && !kIsDense, TiledKv<Kv>, DenseKv<Kv>>;
  using RowsK = RowsOf<true>;
  using RowsV = RowsOf<kIs8BitV>;
  // Columns are rounded up to 32, and two of them are one element.
  CUTE_DEVICE static int k_columns(Problem const& p) { return (p.head_dim + 31) / 32 * 16; }

  static constexpr bool kKeepsQ = kFacts.keeps_q();  // Q stays in registers
  // Keys of a tile that share scales, and the number of these groups in a tile.
  static constexpr int kScaleKeys = kBlockN < quantize::kTileKeys ? kBlockN : quantize::kTileKeys;
  static constexpr int kScaleTiles = kBlockN / kScaleKeys;
  static constexpr bool kHasTwo8BitTiles = kFacts.has_two_8_bit_tiles();
  static constexpr int kStages = kFacts.stages();
  // Buffers for scales of keys: one for each tile that may be in shared memory.
  static constexpr int kScalePlaces = kIs8BitV ? kStages : 2 * kScaleTiles;
  CUTE_DEVICE static int place_of_scales(int key) {
    return int(unsigned(key) / kScaleKeys % kScalePlaces);
  }

  // Whether O and S of a whole tile leave few registers; the scales take some of them.
  static constexpr bool kIsTight = !kKeepsQ && kRowBlocks * (kHeadDimV + kBlockN) >= 320;

  // Keys that go through softmax and P V at a time.
  template <class Score>
  static constexpr int key_block() {
    // With 32 keys, softcap at d128 has 48 bytes of local memory.
    if (kIsE4m3V && kRowBlocks > 1 && (Score::kIsIdentity || !kIsTight)) return 32;
    // With 64 keys, d128 128x64x4 has a hundred more instructions in the loop, for local memory.
    if (kIsInt8V && kRowBlocks > 1 && kIsTight && !Score::kIsGeneral) return 32;
    if (kIs8BitV) return kBlockN;
    if (kFacts.q_and_o() > (kMinBlocksPerSm == 3 ? 64 : 96)) return 16;
    return kKeepsQ && kBlockN % 64 == 0 && (Score::kIsIdentity || Score::kIsGeneral) ? 32 : 16;
  }
  static constexpr int kMaxWeightSum = 4096;

  static constexpr int kMinBlocksPerSm = kFacts.min_blocks_per_sm();
  // P V in int8 with 16 rows per warp and a small head dim fits 128 registers, unless the score has
  // options: four warps per scheduler instead of three are 6 % faster on an H100.
  template <class Score>
  static constexpr int min_blocks_per_sm() {
    return kIsInt8V && kFacts.is_small() && !Score::kIsGeneral ? 4 : kMinBlocksPerSm;
  }

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
  struct BlockInfo : Scales, Base::BlockInfo {};

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

  using SharedStorage =
      std::conditional_t<kKeepsQ, ReusedStorage,
                         std::conditional_t<kHasTwo8BitTiles, HalvedTwiceStorage, HalvedStorage>>;
  static constexpr bool kQIsBehindV = kStages == 2;
  static constexpr int kQOffset = kQIsBehindV ? TileK::kBytes + TileV::kBytes : int(TileK::kBytes);
  // Bytes from one stage of K, or of V, to the next; and from the first stage of K to that of V.
  static constexpr int kKStride =
      TileK::kBytes + TileV::kBytes + (kHasTwo8BitTiles ? TileQ8::kBytes : 0);
  static constexpr int kVStride = kKStride;
  static constexpr int kVOffset = kQIsBehindV ? int(TileK::kBytes) : TileK::kBytes + TileQ8::kBytes;
};

}  // namespace cutlass_attn::sm80
