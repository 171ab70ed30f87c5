// Forward attention on wgmma and TMA (sm_90a: Hopper).
//
// Grid:       persistent, one block per SM (params.hpp). A block computes one tile of kBlockM rows
//             after the other, from core/scheduler.hpp or, for packed sequences, from
//             core/varlen_params.hpp
// Block:      a producer warpgroup, in which one thread copies, one warp with packed sequences, or
//             all four warps with pages (producer.hpp), and consumer warpgroups with 64 rows each
//             (consumer.hpp)
// Registers:  of a consumer warpgroup: S and P of a tile of kBlockN keys, O, softmax state of the
//             rows
// Shared:     rings of tiles of Q, of K and of V, swizzled by TMA, operands of wgmma
// Pipeline:   Q K^T of a key tile overlaps P V of the previous tile, also across tiles of rows. The
//             row max lags (tile/softmax_rows.hpp). A warp that must update its row max recomputes
//             S with mma.sync
// Mask:       a launch before the kernel makes the map of a bool mask (tile/mask_map.hpp)
#pragma once

#include "arch/sm90.hpp"
#include "sm90/consumer.hpp"
#include "sm90/producer.hpp"
#include "tile/mask_map.hpp"
#include "tile/no_launch.hpp"

namespace cutlass_attn::sm90 {

template <class Element, class Shape, class... Options>
struct Forward : KernelDefaults {
  using Traits = cutlass_attn::Traits<Element, Shape, Options...>;
  static_assert(Traits::template are_among<with::PackedRows, with::Pages, with::Bias, with::Mask,
                                           with::Dropout>);
  using Config = sm90::Config<Traits>;
  using Shared = typename Config::SharedStorage;
  using Params = typename Config::Params;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  using Before = MakeMaskMap<Params, kBlockM, kBlockN>;  // launched for calls with a bool mask
  using After = NoLaunch<Params>;
  using Machine = arch::Sm90;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinBlocksPerSm = 1;  // without it, ptxas ignores setmaxnreg
  static constexpr bool kPacksHeads = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads) - 1;
    if (Arch::thread() == 0) {
      init_barriers<Config, Arch>(shared);
      if constexpr (Config::kDrops) shared.dropout = DropoutMask(params.forward.problem);
    }
    Arch::sync();  // barriers are initialised
    if (group < 0) {
      Arch::template setmaxnreg_dec<Config::kCopyRegisters>();
      if (Arch::thread() < 32 * Config::kCopyWarps) {
        Producer<Config, Score, Arch>{params, shared}.run();
      }
    } else {
      Arch::template setmaxnreg_inc<Config::kComputeRegisters>();
      Consumer<Config, Score, Arch>(params, shared, group).run();
    }
  }
};

}  // namespace cutlass_attn::sm90
