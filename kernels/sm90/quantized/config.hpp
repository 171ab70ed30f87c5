// Tile shapes of the wgmma forward kernel with Q K^T in int8 and P V in e4m3.
#pragma once

#include "sm90/config.hpp"
#include "sm90/quantized/params.hpp"

namespace cutlass_attn::sm90 {

// Tiles of K and V in 8 bits, two of which count as an element. Head dims of 64 fill half of K's
// rows of 128 bytes. V has columns of 128 keys.
template <class Traits>
struct QuantizedKv {
  using TileK = SwizzledTile<kValueKeys, whole_chunks(Traits::kHeadDim / 2)>;
  using TileV = SwizzledTile<64, whole_chunks(Traits::kHeadDimV)>;
  using Params = Fp8TmaParams;
  static constexpr bool kHasHalves = true;
};

// Traits of the steps of a warpgroup, for Products, QuantizedQueries and Fp8Weights: key
// blocks of 64 keys, which share a scale of V and of P.
template <class Traits>
struct QuantizedSteps {
  using Element = typename Traits::Element;
  using Place = FragmentPlace<4, 1>;  // by thread
  using QkAccumulator = int32_t;
  using PvAccumulator = cutlass::half_t;
  static constexpr bool kIsFp8 = false;  // as K and V come, before they are rounded
  static constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
  static constexpr int kWarpColumns = kHeadDimV;
  static constexpr int kBlockN = quantize::kTileKeys;
  static constexpr int kWarpsM = 4, kRowBlocks = 1, kRows = 2;
  using TileQ = SwizzledTile<64, whole_chunks(kHeadDim)>;
  using TileQ8 = SwizzledTile<64, whole_chunks(kHeadDim / 2)>;
  using TileK = typename QuantizedKv<Traits>::TileK;
  using TileV = typename QuantizedKv<Traits>::TileV;
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

template <class Traits>
struct QuantizedConfig : Config<Traits, QuantizedKv<Traits>> {
  using Base = Config<Traits, QuantizedKv<Traits>>;
  static_assert(Base::kBlockN == kValueKeys);
  struct SharedStorage : Base::SharedStorage {
    // Of the rows of each quad: the scale, where sums go to softmax times log2_scale; Q . shift.
    using OfQuads = float[Base::kThreads / 4][2];
    alignas(8) OfQuads q_scale, q_shift;
  };
  static_assert(sizeof(SharedStorage) <= Base::kMaxSmemBytes);
  // The most that a consumer thread of two warpgroups can have.
  static constexpr int kCopyRegisters = Base::kGroups == 2 ? 24 : Base::kCopyRegisters;
  static constexpr int kComputeRegisters = Base::kGroups == 2 ? 240 : Base::kComputeRegisters;
  using Steps = QuantizedSteps<Traits>;
};

}  // namespace cutlass_attn::sm90
