// Forward attention on wgmma and TMA with Q K^T in int8 and P V in e4m3 (sm_90a: Hopper).
// core/quantize.hpp defines the rounding, kFp8.
//
// Before:     a launch rounds K to int8 and V to e4m3, and transposes V (../../quantized/
//             quantize_values.hpp)
// Grid:       that of the kernel in 16 bits (sm90/forward.hpp), with its producer
// Block:      a producer warpgroup, and consumer warpgroups with 64 rows each (consumer.hpp)
// Registers:  of a consumer warpgroup: S, w and P of 64 keys; P V of these keys, of all columns or,
//             beyond 128, of 64; O; softmax state of the rows
// Shared:     rings of tiles of Q, in 16 bits until a warpgroup has rounded it, of K with all
//             scales, and of V, 128 keys each, swizzled by TMA
// Pipeline:   P V of 64 keys overlaps softmax of the next 64 keys. Sums of e4m3 products lose bits
//             in the tensor cores, so those of each 64 keys are added to O in fp32
#pragma once

#include "arch/sm90.hpp"
#include "quantized/quantize_values.hpp"
#include "sm90/producer.hpp"
#include "sm90/quantized/consumer.hpp"
#include "tile/no_launch.hpp"

namespace cutlass_attn::sm90 {

// Accumulators: int32_t and half_t, which stand for products in int8 and in e4m3.
template <class Element, class Shape, class Accumulators>
struct QuantizedForward : KernelDefaults {
  static_assert(std::is_same_v<Accumulators, with::Accumulators<int32_t, cutlass::half_t>>);
  using Config = QuantizedConfig<Traits<Element, Shape>>;
  using Shared = typename Config::SharedStorage;
  using Params = typename Config::Params;
  using Before = QuantizeKeysAndValues<Element, Shape::kHeadDim, Shape::kHeadDimV, Params>;
  using After = NoLaunch<Params>;
  using Machine = arch::Sm90;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinBlocksPerSm = 1;  // without it, ptxas ignores setmaxnreg
  static constexpr bool kPacksHeads = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads) - 1;
    if (Arch::thread() == 0) init_barriers<Config, Arch>(shared);
    Arch::sync();  // barriers are initialised
    if (group < 0) {
      Arch::template setmaxnreg_dec<Config::kCopyRegisters>();
      if (Arch::thread() < 32) Producer<Config, Score, Arch>{params, shared}.run();
    } else {
      Arch::template setmaxnreg_inc<Config::kComputeRegisters>();
      QuantizedConsumer<Config, Score, Arch>(params, shared, group).run();
    }
  }
};

}  // namespace cutlass_attn::sm90
