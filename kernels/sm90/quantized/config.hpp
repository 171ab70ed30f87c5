// Tile shapes of the wgmma forward kernel with Q K^T in int8 and P V in e4m3.
#pragma once

#include "sm90/config.hpp"
#include "sm90/quantized/params.hpp"

namespace cutlass_attn::sm90 {

// Tiles of K and V in 8 bits, two of which count as an element. Head dims of 64 fill half of K's
// rows of 128 bytes. V has columns of 128 keys.
template <int kHeadDim, int kHeadDimV>
struct QuantizedKv {
  using TileK = SwizzledTile<kValueKeys, whole_chunks(kHeadDim / 2)>;
  using TileV = SwizzledTile<64, whole_chunks(kHeadDimV)>;
  using Params = Fp8TmaParams;
  static constexpr bool kHasHalves = true;
};

// Traits of the steps of a warpgroup, for sm80::Products, QuantizedQueries and Fp8Weights: key
// blocks of 64 keys, which share a scale of V and of P.
template <class Element_, int kHeadDim_, int kHeadDimV_>
struct QuantizedSteps {
  using Element = Element_;
  using Place = FragmentPlace<4, 1>;  // by thread
  using QkAccumulator = int32_t;
  using PvAccumulator = cutlass::half_t;
  static constexpr bool kIsFp8 = false;  // as K and V come, before they are rounded
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kWarpColumns = kHeadDimV;
  static constexpr int kBlockN = quantize::kTileKeys;
  static constexpr int kWarpsM = 4, kRowBlocks = 1, kRows = 2;
  using TileQ = SwizzledTile<64, whole_chunks(kHeadDim)>;
  using TileQ8 = SwizzledTile<64, whole_chunks(kHeadDim / 2)>;
  using TileK = typename QuantizedKv<kHeadDim, kHeadDimV>::TileK;
  using TileV = typename QuantizedKv<kHeadDim, kHeadDimV>::TileV;
  template <class Score>
  static constexpr int key_block() {
    return kBlockN;
  }
  template <class Accumulator, int kColumns>
  using Fragment = cutlass_attn::Fragment<Accumulator, kRowBlocks, kColumns / 8>;

  // Q in int8 stays in registers up to a head dim of 128, and is read from shared memory beyond.
  static constexpr bool kKeepsQ = kHeadDim <= 128;
  // Columns of O that P V of a key block is accumulated for at a time, beside O.
  static constexpr int kPvColumns = kHeadDimV <= 128 ? kHeadDimV : 64;
  static_assert(kHeadDimV % kPvColumns == 0);
};

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps>
struct QuantizedConfig
    : Config<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps, RowLayout::kDense, false,
             false, false, QuantizedKv<kHeadDim, kHeadDimV>> {
  using Base = Config<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps, RowLayout::kDense,
                      false, false, false, QuantizedKv<kHeadDim, kHeadDimV>>;
  static_assert(kBlockN == kValueKeys);
  struct SharedStorage : Base::SharedStorage {
    // Of the rows of each quad: the scale, where sums go to softmax times log2_scale; Q . shift.
    using OfQuads = float[Base::kThreads / 4][2];
    alignas(8) OfQuads q_scale, q_shift;
  };
  static_assert(sizeof(SharedStorage) <= Base::kMaxSmemBytes);
  // The most that a consumer thread of two warpgroups can have.
  static constexpr int kCopyRegisters = kWarps == 8 ? 24 : Base::kCopyRegisters;
  static constexpr int kComputeRegisters = kWarps == 8 ? 240 : Base::kComputeRegisters;
  using Steps = QuantizedSteps<Element, kHeadDim, kHeadDimV>;
};

}  // namespace cutlass_attn::sm90
