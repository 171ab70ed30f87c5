// Tile shapes and shared memory of the wgmma backward kernel.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include "arch/mbarrier.hpp"
#include "sm80/backward_block.hpp"
#include "sm90/backward_params.hpp"
#include "sm90/config.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn::sm90 {

// kWarps warps, in warpgroups of four with 64 keys each, compute; another warpgroup copies.
template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kGroups = kWarps_ / 4, kGroupThreads = 128;
  static constexpr int kComputeThreads = kGroups * kGroupThreads;
  static constexpr int kThreads = kComputeThreads + kGroupThreads;
  static constexpr int kCopyRegisters = 24, kComputeRegisters = 240;
  static constexpr int kColumnsOfQ = kHeadDim / kGroups;  // of dQ, of a warpgroup
  static_assert(kGroups == 2 && kBlockN == 64 * kGroups && kBlockM == BackwardParams::kBlockM);
  static_assert(kHeadDim == 64 || kHeadDim == 128);

  // What sm80::BackwardProducts and sm80::BackwardScores ask for: slices are whole tiles.
  static constexpr bool kIsGeneral = false, kIsOrdered = false, kHasBiasGrad = false;
  static constexpr bool kDrops = false, kMayDrop = false;
  static constexpr int kWarpsN = kWarps_, kWarpKeys = 16, kKeyBlocks = 1, kSlice = kBlockM;
  static constexpr int kSteps = kHeadDim / 16, kStationary = 0;

  using TileKv = SwizzledTile<kBlockN, kHeadDim>;
  using TileQ = SwizzledTile<kBlockM, kHeadDim>;  // of Q and of dO
  using TileS = SwizzledTile<kBlockN, kBlockM>;   // of dS: key, query
  static constexpr int kStages = 2;

  struct SharedStorage {
    alignas(1024) char k[TileKv::kBytes];
    char v[TileKv::kBytes];
    char q[kStages][TileQ::kBytes];
    char grad_o[kStages][TileQ::kBytes];
    char grad_s[2][TileS::kBytes];                   // of a step and of the one before
    alignas(16) float stats[kStages][kBlockM][2];    // -LSE in log2, delta
    alignas(16) int32_t queries_of_key[kBlockN][2];  // that see it: from, to
    sm80::BackwardBlock<DenseSeqInfo, kWarpsN> block;
    // Full: the copy has landed; that of Q with the statistics. Empty: all of a stage is read by
    // none any more.
    arch::Barrier k_full, v_full, q_full[kStages], grad_o_full[kStages], empty[kStages];
  };
};

// A tile of queries of a query head; `number` counts steps.
struct BackwardPosition {
  int head, tile, number;

  CUTE_DEVICE BackwardPosition next(TileRange const& range) const {
    bool const is_last = tile + 1 == range.end;
    return {head + is_last, is_last ? range.begin : tile + 1, number + 1};
  }
};

}  // namespace cutlass_attn::sm90
