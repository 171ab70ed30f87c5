// Forward attention on wgmma and TMA (sm_90a: Hopper).
//
// Grid:       persistent, one block per SM (params.hpp). A block computes one tile of kBlockM rows
//             after the other, from core/scheduler.hpp or, for packed sequences, from
//             core/varlen_params.hpp
// Block:      a producer warpgroup, in which one thread copies, or with packed sequences or pages a
//             warp (producer.hpp), and consumer warpgroups with 64 rows each (consumer.hpp)
// Registers:  of a consumer warpgroup: S and P of a tile of kBlockN keys, O, softmax state of the
//             rows
// Shared:     rings of tiles of Q, of K and of V, swizzled by TMA, read by wgmma
// Pipeline:   Q K^T of a tile of keys overlaps P V of the previous tile, also across tiles of rows.
//             The row max lags (tile/softmax_rows.hpp). A warp that must update its row max
//             recomputes S with mma.sync
// Mask:       of a bool mask, a launch before the kernel makes a map (tile/mask_map.hpp)
#pragma once

#include "arch/sm90.hpp"
#include "sm90/consumer.hpp"
#include "sm90/producer.hpp"
#include "tile/mask_map.hpp"
#include "tile/no_aside.hpp"

namespace cutlass_attn::sm90 {

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM_, int kBlockN_, int kWarps,
          RowLayout kLayout = RowLayout::kDense, bool kHasBias = false, bool kHasMask = false,
          bool kDrops = false>
struct Forward {
  using Config = sm90::Config<Element, kHeadDim, kHeadDimV, kBlockM_, kBlockN_, kWarps, kLayout,
                              kHasBias, kHasMask, kDrops>;
  using Shared = typename Config::SharedStorage;
  using Params = typename Config::Params;
  using Before = MakeMaskMap<Params, kBlockM_, kBlockN_>;  // launched where there is a mask
  using After = NoAside<Params>;
  using Machine = arch::Sm90;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinBlocksPerSm = 1;  // without, ptxas ignores setmaxnreg
  static constexpr bool kPacksHeads = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads) - 1;
    if (Arch::thread() == 0) {
      init_barriers<Config, Arch>(shared);
      if constexpr (kDrops) shared.dropout = DropoutMask(params.forward.problem);
    }
    Arch::sync();  // barriers are initialised
    if (group < 0) {
      Arch::template registers_decrease<Config::kCopyRegisters>();
      if (Arch::thread() < 32) Producer<Config, Score, Arch>{params, shared}.run();
    } else {
      Arch::template registers_increase<Config::kComputeRegisters>();
      Consumer<Config, Score, Arch>(params, shared, group).run();
    }
  }
};

}  // namespace cutlass_attn::sm90
