// Tile shapes of the wgmma forward kernel with Q K^T in int8 and P V in e4m3.
#pragma once

#include "sm90/config.hpp"
#include "sm90/quantized/params.hpp"

namespace cutlass_attn::sm90 {

// Tiles of K and V in 8 bits. Two 8-bit numbers count as one element. At a head dim of 64, K fills
// half of its rows of 128 bytes. V is transposed: a row is a column of 128 keys.
template <class Traits>
struct QuantizedKv {
  using TileK = SwizzledTile<kValueKeys, whole_chunks(Traits::kHeadDim / 2)>;
  using TileV = SwizzledTile<64, whole_chunks(Traits::kHeadDimV)>;
  using Params = Fp8TmaParams;
  static constexpr bool kHasHalves = true;
  static constexpr int kScaleBytes = Params::kScaleBytes;
};

// Traits required by Products, QuantizedQueries and Fp8Weights, for a warpgroup and a key block of
// 64 keys, which share a scale of V and of P.
template <class Traits>
struct QuantizedSteps {
  using Element = typename Traits::Element;
  using ElementK = int8_t;
  using Place = FragmentPlace<4, 1>;  // by thread
  using QkAccumulator = int32_t;
  using PvAccumulator = cutlass::half_t;
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

  // Columns of O whose P V of a key block is accumulated at a time, in registers beside those of O.
  static constexpr int kPvColumns = kHeadDimV <= 128 ? kHeadDimV : 64;
  static_assert(kHeadDimV % kPvColumns == 0);
};

template <class Traits>
struct QuantizedConfig : Config<Traits, QuantizedKv<Traits>> {
  using Base = Config<Traits, QuantizedKv<Traits>>;
  static_assert(Base::kBlockN == kValueKeys);
  struct SharedStorage : Base::SharedStorage {
    // For the two rows of each quad: q_scale, times log2_scale if sums go to softmax; Q . shift.
    using OfQuads = float[Base::kThreads / 4][2];
    alignas(8) OfQuads q_scale, q_shift;
  };
  static_assert(sizeof(SharedStorage) <= Base::kMaxSmemBytes);
  // Two consumer warpgroups can have at most 240 registers per thread.
  static constexpr int kCopyRegisters = Base::kGroups == 2 ? 24 : Base::kCopyRegisters;
  static constexpr int kComputeRegisters = Base::kGroups == 2 ? 240 : Base::kComputeRegisters;
  using Steps = QuantizedSteps<Traits>;
};

}  // namespace cutlass_attn::sm90
