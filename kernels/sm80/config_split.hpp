// Tile shapes and shared memory of the split schedule: see mainloop_split.hpp.
#pragma once

#include "sm80/config.hpp"

namespace cutlass_attn::sm80 {

// The members that ForwardConfig has too mean the same here.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_,
          int kColumnWarps_>
struct SplitConfig {
  using Element = Element_;
  using QkAccumulator = float;
  using PvAccumulator = float;
  static constexpr int kWeightLimit = 4096;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kWarps = kWarps_;              // below each other along the rows
  static constexpr int kColumnWarps = kColumnWarps_;  // beside each other along keys, and columns
  static constexpr int kThreads = 32 * kWarps * kColumnWarps;
  static constexpr int kWarpRows = kBlockM / kWarps;
  static constexpr int kWarpColumns = kHeadDimV / kColumnWarps;  // of O
  static_assert(kHeadDim % 64 == 0 && kBlockM % (16 * kWarps) == 0 && kBlockN % 16 == 0);
  static_assert(kHeadDimV % (64 * kColumnWarps) == 0, "so that a warp's columns of V are chunks");

  // Keys of a tile whose scores a warp computes.
  static constexpr int kSlice = kBlockN / kColumnWarps;
  template <class Score>
  static constexpr int slice() {
    return kSlice;
  }
  static_assert(kSlice == 8, "so that an ldmatrix of K brings 8 keys x 32 columns");

  static constexpr bool kPipelined = false;
  static constexpr int kStages = 1;

  // How many columns of Q stay in registers, in steps of 16; only the others are read from shared
  // memory, in every tile. With O they take up to 160 registers; the general score, which holds
  // more values of its own, leaves room for fewer.
  static constexpr int steps_in_registers(bool is_general) {
    int const budget = is_general ? 144 : 160;
    int const steps = (budget - kWarpRows / 16 * (kWarpColumns / 8) * 4) / (kWarpRows / 16 * 4);
    return steps < kHeadDim / 16 ? steps : kHeadDim / 16;
  }

  using TileQ = SwizzledTile<kBlockM, kHeadDim>;
  using TileK = SwizzledTile<kBlockN, kHeadDim>;
  using TileV = SwizzledTile<kBlockN, kHeadDimV>;
  using TileO = SwizzledTile<kBlockM, kHeadDimV>;
  using TileP = SwizzledTile<kWarpRows, kBlockN>;  // of the warps that share rows

  // Q comes in across the end of V: the first chunks, which move on to registers before there is a
  // V, are in V's place, the others behind it. O takes the place of K, and then of V, once nobody
  // reads them any more; so does the exchange of sums.
  static constexpr int kMovedBytes = steps_in_registers(true) / 4 * TileQ::kChunkBytes;
  static constexpr int kQueriesAt = TileK::kBytes + TileV::kBytes - kMovedBytes;
  static_assert(kMovedBytes <= TileV::kBytes);

  struct SharedStorage {
    alignas(128) char k[1][TileK::kBytes];
    alignas(128) char v[1][TileV::kBytes];
    alignas(128) char q_and_p[TileQ::kBytes - kMovedBytes + kWarps * TileP::kBytes];
    // The tile of keys in which a warp last found a weight too large, by its first key.
    int32_t large_at[kWarps][kColumnWarps];
    // Here, because registers are what the loop is short of.
    TileCoord tile;
    TileRange range;
    NearMask mask;
    Dropout dropout;

    CUTE_DEVICE char* p(int row_warp) {
      return q_and_p + (TileQ::kBytes - kMovedBytes) + row_warp * TileP::kBytes;
    }
  };
  static constexpr int kBufferBytes = TileK::kBytes + TileV::kBytes;
  static_assert(sizeof(SharedStorage) <= kMaxSmemBytes);
  static_assert(TileO::kBytes <= kBufferBytes);

  // Of the warps below each other; those beside each other differ in where their operands are.
  template <class Arch, class Accumulator = float>
  using TiledMma = TiledMMA<MMA_Atom<typename Arch::template Mma<Element, Accumulator>>,
                            Layout<Shape<Int<kWarps>, _1, _1>>, Tile<Int<16 * kWarps>, _8, _16>>;

  static constexpr int kMinBlocksPerSm = 1;
};

}  // namespace cutlass_attn::sm80
