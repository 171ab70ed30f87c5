// Tile shapes, shared memory and registers of the mma.sync backward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "core/sequences.hpp"
#include "core/traits.hpp"
#include "tile/backward_block.hpp"
#include "tile/backward_params.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm80 {

// Q, K, V and O have one padded head dim. A block has kBlockN keys and processes kBlockM queries
// per step.
template <class Traits>
struct BackwardConfig {
  using Element = typename Traits::Element;
  using SeqInfo = typename Traits::SeqInfo;
  static constexpr bool kIsVarlen = !Traits::kIsDense;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static_assert(Traits::kHeadDimV == kHeadDim && Traits::kWarpsN == 1);
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static constexpr int kWarps = Traits::kWarps, kThreads = 32 * kWarps;
  static constexpr bool kIsGeneral = Traits::kIsGeneral, kIsOrdered = Traits::kIsOrdered;
  static constexpr bool kDrops = Traits::kDrops, kMayDrop = kDrops || kIsGeneral;
  static constexpr bool kHasBiasGrad = Traits::kHasBiasGrad;
  static_assert(!kHasBiasGrad || (kIsGeneral && !kIsOrdered), "grad bias is added in any order");
  static constexpr int kSteps = kHeadDim / 16;  // k-steps of a product over head-dim columns

  // Up to head dim 64 a warp computes both chains of products of its keys: S = K Q^T, P, dV += P
  // dO; and dP = V dO^T, dS, dK += dS Q. For wider heads, accumulators and stationary operands of
  // one chain fill the registers. Two warps then share the keys: the first role computes the first
  // chain, the second role the second chain.
  static constexpr bool kHasRoles = kHeadDim > 64;
  static constexpr int kChains = kHasRoles ? 1 : 2;  // per warp
  static constexpr int kWarpsN = kHasRoles ? kWarps / 2 : kWarps;
  static constexpr int kWarpKeys = kBlockN / kWarpsN;
  static constexpr int kKeyBlocks = kWarpKeys / 16;  // m16 blocks per warp

  // Queries that go through softmax at a time. Dropout's random numbers leave registers for few
  // queries. Each slice needs a named barrier to pass P on, which limits the number of slices.
  static constexpr int kNamedBarriers = 15;
  static constexpr bool kHasSmallSlices =
      kMayDrop && (!kHasRoles || kWarpsN * kBlockM / 16 <= kNamedBarriers);
  static constexpr int kSlice = kBlockM < 32 || kHasSmallSlices ? 16 : 32;
  static constexpr int kSlices = kBlockM / kSlice;
  // Separate code per slice gains 2 % at head dim 64. With roles it spills, except for the small
  // slices of dropout.
  static constexpr int kUnrolledSlices =
      kIsGeneral || (kHasRoles && !(kDrops && kHasSmallSlices)) ? 1 : kSlices;

  // k-steps of a chain's K or V that stay in registers. The other k-steps are read from shared
  // memory for every tile of queries. If all of V stays in registers, the first tiles of Q use its
  // shared memory; otherwise tiles of head dims from 128 on would not fit the 99 KB of Ada. The
  // number is the largest that does not spill: on an H200 two more cost 9 % at head dim 128 and 5 %
  // at 256.
  static constexpr int stationary_steps() {
    if (kIsGeneral) return kKeyBlocks == 1 ? kSteps : 0;
    if (kHeadDim == 64) return kKeyBlocks == 1 ? kSteps : 0;
    if (kBlockM < 64) return kSteps;
    return kHeadDim == 128 ? 6 : kHeadDim == 256 ? 8 : kSteps;
  }
  static constexpr int kStationary = stationary_steps();
  static constexpr bool kKeepsV = kStationary < kSteps;

  static constexpr int kMinBlocksPerSm = kHasRoles ? 1 : 2;

  using TileKv = SwizzledTile<kBlockN, kHeadDim>;
  using TileQ = SwizzledTile<kBlockM, kHeadDim>;  // Q and dO
  using TileS = SwizzledTile<kBlockN, kBlockM>;   // dS: (key, query)
  static constexpr int kStages = 2;
  // Stages of dO. One if two do not fit the 99 KB of Ada: dO of a step is then copied at the
  // beginning of the step, while the second role adds the previous dQ and the first role computes K
  // Q^T.
  static constexpr int kGradOStages = kHeadDim == 256 && kBlockM == 32 ? 1 : kStages;
  static_assert(kGradOStages == kStages || kHasRoles);

  // dQ of a step: warps along M, each with kQueryBlocks m16 blocks and a share of the columns.
  static constexpr int warps_of_dq() {
    for (int warps = 1; warps <= kWarps; warps *= 2) {
      bool const fits = kBlockM / 16 % warps == 0 && kBlockM / 16 / warps <= 2;
      if (fits && kSteps % (kWarps / warps) == 0) return warps;
    }
    return 0;
  }
  static constexpr int kWarpsM = warps_of_dq();
  static_assert(kWarpsM > 0, "the warps cannot divide dQ evenly");
  static constexpr int kQueryBlocks = kBlockM / 16 / kWarpsM;
  static constexpr int kColumnBlocks = kSteps / (kWarps / kWarpsM);  // 16 columns each
  // Column blocks that a warp accumulates at a time: dK and dV leave few registers.
  static constexpr int kColumnsAtOnce = kColumnBlocks % 2 == 0 ? 2 : 1;
  static_assert(kQueryBlocks == 1 || kBlockM % 32 == 0);

  static_assert(kHeadDim % 32 == 0 && kBlockM % kSlice == 0 && kBlockN % (16 * kWarpsN) == 0);
  static constexpr int kGradOBarriers = kGradOStages == kStages ? 0 : 2;
  static_assert(!kHasRoles || kWarpsN * kSlices + kGradOBarriers <= kNamedBarriers,
                "each slice of a warp needs a named barrier for P, and dO needs two");

  struct Stages {  // of steps
    alignas(128) char q[kStages][TileQ::kBytes];
    alignas(128) char grad_o[kGradOStages][TileQ::kBytes];
    alignas(128) char grad_s[kStages][TileS::kBytes];
  };
  using BlockInfo = BackwardBlock<SeqInfo, kWarpsN>;
  // Row 0 of the block's first query head, for each operand that is copied or added to. Stored
  // here, because recomputing the addresses from batch and head in every step takes four 64-bit
  // products of 13 instructions each.
  struct Rows {
    void const *q, *grad_o;
    float const* stats;
    float* grad_q;
  };
  struct Keys {
    alignas(128) char k[TileKv::kBytes];
  };
  struct KeysAndValues : Keys {
    alignas(128) char v[TileKv::kBytes];
  };
  // V follows K. If V moves to registers, it first lies where the stages are.
  struct SharedStorage : std::conditional_t<kKeepsV, KeysAndValues, Keys> {
    Stages stages;
    // P for the second role, laid out as BackwardScores::SavedWeights.
    alignas(128) char p[kHasRoles ? TileS::kBytes * (kHasBiasGrad ? 2 : 1) : 128];
    alignas(16) float stats[kStages][kBlockM][2];    // -LSE in log2, delta
    alignas(16) int32_t queries_of_key[kBlockN][2];  // queries that see a key: [begin, end)
    BlockInfo block;
    Rows from;
  };
  static_assert(kKeepsV || sizeof(Stages) >= TileKv::kBytes);
  // Byte distances from K to V, and from Q to dO of a step.
  static constexpr int kVDistance = TileKv::kBytes;
  static constexpr int kGradODistance = kStages * TileQ::kBytes;
};

}  // namespace cutlass_attn::sm80
