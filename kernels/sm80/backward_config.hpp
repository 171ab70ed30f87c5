// Tile shapes, shared memory and registers of the mma.sync backward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "core/sequences.hpp"
#include "core/traits.hpp"
#include "core/vector.hpp"
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

  // Up to head dim 64 a warp computes both chains of products of its keys: S = K Q^T, P, dV += P
  // dO; and dP = V dO^T, dS, dK += dS Q. For wider heads, accumulators and stationary operands of
  // one chain fill the registers. Two warps then share the keys: the first role computes the first
  // chain, the second role the second chain.
  static constexpr bool kHasRoles = kHeadDim > 64;
  static constexpr int kChains = kHasRoles ? 1 : 2;  // per warp
  // Beyond head dim 256, a gradient of 16 keys does not fit a warp's registers. Two warps then
  // share a role: each has half of the columns of K or V, Q, dO and the gradient. They add up their
  // parts of S or dP through shared memory, and both compute P or dS.
  static constexpr int kColumnGroups = kHeadDim > 256 ? 2 : 1;
  static constexpr int kColumns = kHeadDim / kColumnGroups;  // of a warp
  static constexpr int kSteps = kColumns / 16;               // k-steps of a warp's part of S or dP
  static constexpr int kWarpsN = kWarps / kColumnGroups / (kHasRoles ? 2 : 1);
  static constexpr int kWarpKeys = kBlockN / kWarpsN;
  static constexpr int kKeyBlocks = kWarpKeys / 16;  // m16 blocks per warp

  // Queries that go through softmax at a time. Dropout's random numbers, and halves of columns,
  // leave registers for few queries. Each slice needs a named barrier to pass P on, which limits
  // the number of slices.
  static constexpr int kNamedBarriers = 15;
  static constexpr bool kHasSmallSlices =
      kMayDrop && (!kHasRoles || kWarpsN * kBlockM / 16 <= kNamedBarriers);
  static constexpr int kSlice = kBlockM < 32 || kHasSmallSlices || kColumnGroups > 1 ? 16 : 32;
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
    if (kColumnGroups > 1 && kBlockM == 32) return 14;
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
  static constexpr int kGradOStages =
      kHeadDim > 256 || (kHeadDim == 256 && kBlockM == 32) ? 1 : kStages;
  static_assert(kGradOStages == kStages || kHasRoles);

  // dQ of a step: warps along M, each with kQueryBlocks m16 blocks and a share of the columns.
  static constexpr int warps_of_dq() {
    for (int warps = 1; warps <= kWarps; warps *= 2) {
      bool const fits = kBlockM / 16 % warps == 0 && kBlockM / 16 / warps <= 2;
      if (fits && kHeadDim / 16 % (kWarps / warps) == 0) return warps;
    }
    return 0;
  }
  static constexpr int kWarpsM = warps_of_dq();
  static_assert(kWarpsM > 0, "the warps cannot divide dQ evenly");
  static constexpr int kQueryBlocks = kBlockM / 16 / kWarpsM;
  static constexpr int kColumnBlocks = kHeadDim / 16 / (kWarps / kWarpsM);  // 16 columns each
  // Column blocks that a warp accumulates at a time: dK and dV leave few registers.
  static constexpr int kColumnsAtOnce = kColumnBlocks % 2 == 0 ? 2 : 1;
  static_assert(kQueryBlocks == 1 || kBlockM % 32 == 0);

  static_assert(kHeadDim % 32 == 0 && kBlockM % kSlice == 0 && kBlockN % (16 * kWarpsN) == 0);
  static constexpr int kGradOBarriers = kGradOStages == kStages ? 0 : 2;
  // Warps that have equal keys and columns, in two roles; and warps that have parts of one sum.
  static constexpr int kPairs = kWarpsN * kColumnGroups;
  static constexpr int kSumBarriers = kColumnGroups > 1 ? 2 * kWarpsN : 0;
  static_assert(
      !kHasRoles || kPairs * kSlices + kGradOBarriers + kSumBarriers <= kNamedBarriers,
      "each slice of a pair needs a named barrier for P, dO needs two, each sum needs one");
  static_assert(kColumnGroups == 1 || (kColumnGroups == 2 && kHasRoles));

  struct Stages {  // of steps
    alignas(128) char q[kStages][TileQ::kBytes];
    alignas(128) char grad_o[kGradOStages][TileQ::kBytes];
    alignas(128) char grad_s[kStages][TileS::kBytes];
  };
  using BlockInfo = BackwardBlock<SeqInfo, kWarpsN>;
  static constexpr int kPBytes = TileS::kBytes * kColumnGroups;
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
  // S of a slice, or dP, from the columns of one warp.
  struct PartOfSlice {
    Quad blocks[kSlice / 8][kKeyBlocks][32];  // of each lane
  };
  struct Parts {
    PartOfSlice parts[2][kWarpsN][kSlices][kColumnGroups];  // first: role
  };
  struct NoParts {};
  // V follows K. If V moves to registers, it first lies where the stages are.
  struct SharedStorage : std::conditional_t<kKeepsV, KeysAndValues, Keys>,
                         std::conditional_t<(kColumnGroups > 1), Parts, NoParts> {
    Stages stages;
    // P for the second role, laid out as BackwardScores::SavedWeights.
    alignas(128) char p[kHasRoles ? kPBytes * (kHasBiasGrad ? 2 : 1) : 128];
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
