// A translation unit of a GPU kernel: its entries, one per score functor, and its facts. nvcc
// compiles this source with the library, NVRTC at first use. The kernel type supplies
//
//   using Params;                    // its arguments, see runtime/kernel.hpp
//   static constexpr int kThreads, kMinBlocksPerSm, kSmemBytes;
//   static constexpr int kBlockM;        // rows of a block's tile
//   template <class Score, class Arch>
//   static void run(Params const&, char* smem);
//
// and derives from KernelDefaults (core/launch.hpp), which has more constants. Optional:
// `template <class Score> min_blocks_per_sm()`, if it differs between scores; the types of
// pre-launch and post-launch, before and after the kernel,
//
//   struct Before, After { kThreads, kSmemBytes; template <class Arch> static void run(as above); }
//
// host_unit.hpp compiles the same type for the CPU.
#pragma once

#include "arch/grid.hpp"
#include "arch/sm80.hpp"
#include "core/general_score.hpp"
#include "core/launch.hpp"

namespace cutlass_attn {

// Blocks per SM that the register limit of the entry for Score allows.
template <class Kernel, class Score, class = int>
struct MinBlocksPerSm {
  static constexpr int value = Kernel::kMinBlocksPerSm;
};
template <class Kernel, class Score>
struct MinBlocksPerSm<Kernel, Score, decltype(Kernel::template min_blocks_per_sm<Score>())> {
  static constexpr int value = Kernel::template min_blocks_per_sm<Score>();
};

}  // namespace cutlass_attn

// The __global__ function <symbol>__<token>: runs a block of Kernel with the score given by the
// last argument.
#define CA_KERNEL_ENTRY(symbol, token, Kernel, ...)                                   \
  extern "C" __global__ void __launch_bounds__(                                       \
      Kernel::kThreads, (::cutlass_attn::MinBlocksPerSm<Kernel, __VA_ARGS__>::value)) \
      symbol##__##token(__grid_constant__ Kernel::Params const params) {              \
    using Machine = Kernel::Machine;                                                  \
    extern __shared__ __align__(Machine::kSmemAlignment) char smem[];                 \
    ::cutlass_attn::arch::begin_block<Kernel>();                                      \
    Kernel::template run<__VA_ARGS__, Machine>(params, smem);                         \
  }

// The __global__ function of a kernel whose score has these terms and a user's function, Mod.
#define CA_SCORE_MOD_ENTRY(symbol, token, Kernel, Mod, ...)                               \
  namespace symbol##__##token##_mod {                                                     \
    using Term = ::cutlass_attn::ScoreMod<Mod, Kernel::Params>;                           \
    using Mine = ::cutlass_attn::WithTerm<__VA_ARGS__, Term>::type;                       \
  }                                                                                       \
  extern "C" __global__ void __launch_bounds__(                                           \
      Kernel::kThreads,                                                                   \
      (::cutlass_attn::MinBlocksPerSm<Kernel, symbol##__##token##_mod::Mine>::value))     \
      symbol##__##token(                                                                  \
          __grid_constant__::cutlass_attn::WithScoreMod<Kernel::Params, Mod> const all) { \
    using Machine = Kernel::Machine;                                                      \
    extern __shared__ __align__(Machine::kSmemAlignment) char smem[];                     \
    ::cutlass_attn::arch::begin_block<Kernel>();                                          \
    Kernel::template run<symbol##__##token##_mod::Mine, Machine>(all.params, smem);       \
  }

// The __global__ function of a pre- or post-launch, Kernel::PrePost.
#define CA_PRE_POST_ENTRY(symbol, token, Kernel, PrePost)                 \
  extern "C" __global__ void __launch_bounds__(Kernel::PrePost::kThreads) \
      symbol##__##token(__grid_constant__ Kernel::Params const params) {  \
    using Machine = Kernel::Machine;                                      \
    extern __shared__ __align__(128) char smem[];                         \
    ::cutlass_attn::arch::begin_block<Kernel>();                          \
    Kernel::PrePost::template run<Machine>(params, smem);                 \
  }

// For the host: from nvcc a KernelUnit with the given entries, from NVRTC the facts.
#if defined(__CUDACC_RTC__)
#define CA_KERNEL_UNIT(symbol, Kernel, ...)                                \
  extern "C" __device__::cutlass_attn::KernelFacts const symbol##__facts = \
      ::cutlass_attn::facts_of<Kernel>();
#define CA_KERNEL_UNIT_WITH_PRE_POST(symbol, Kernel, ...) \
  CA_KERNEL_UNIT(symbol, Kernel, __VA_ARGS__)
#else
#include "runtime/kernel.hpp"
#define CA_KERNEL_UNIT(symbol, Kernel, ...) \
  extern KernelUnit const symbol##__unit;   \
  KernelUnit const symbol##__unit{::cutlass_attn::facts_of<Kernel>(), {__VA_ARGS__}, {}};
#define CA_KERNEL_UNIT_WITH_PRE_POST(symbol, Kernel, ...)             \
  extern KernelUnit const symbol##__unit;                             \
  KernelUnit const symbol##__unit{::cutlass_attn::facts_of<Kernel>(), \
                                  {__VA_ARGS__},                      \
                                  {},                                 \
                                  {CA_ENTRY(symbol, before), CA_ENTRY(symbol, after)}};
#endif

// An entry in the list of a CA_KERNEL_UNIT.
#define CA_ENTRY(symbol, token) reinterpret_cast<void const*>(&symbol##__##token)
