// A GPU kernel in the form in which it is launched, whoever compiled it: nvcc with the library, or
// NVRTC when it was needed first.
#pragma once

#include <atomic>
#include <cstdint>

#include "cutlass_attn.hpp"

namespace cutlass_attn {

// What the host knows of a kernel type and the scores that it is compiled with. A constant: no part
// of the kernel's body is compiled for it.
struct KernelFacts {
  static constexpr int kMaxScores = 4;

  int threads = 0;
  int smem_bytes = 0;
  int block_m = 0;           // rows of a block's tile
  bool packs_heads = false;  // which may be of several heads
  int num_scores = 0;
  bool (*takes[kMaxScores])(AttnParams const&) = {};
  char const* scores[kMaxScores] = {};
};

// What the scores alone tell.
template <class... Scores>
constexpr KernelFacts facts_of_scores() {
  static_assert(sizeof...(Scores) <= KernelFacts::kMaxScores);
  KernelFacts facts;
  // One by one: nvcc 13.0 loses the second of two packs in a braced list.
  ((facts.takes[facts.num_scores] = &Scores::takes,
    facts.scores[facts.num_scores++] = Scores::kToken),
   ...);
  return facts;
}

template <class Kernel, class... Scores>
constexpr KernelFacts facts_of() {
  KernelFacts facts = facts_of_scores<Scores...>();
  facts.threads = Kernel::kThreads;
  facts.smem_bytes = Kernel::kSmemBytes;
  facts.block_m = Kernel::kBlockM;
  facts.packs_heads = Kernel::kPacksHeads;
  return facts;
}

struct KernelImage {
  KernelFacts facts;
  void const*
      functions[KernelFacts::kMaxScores];  // by score: a __global__ function or cudaKernel_t
  // By score, a bit per device on which the function may use its shared memory.
  mutable std::atomic<uint64_t> opted_in[KernelFacts::kMaxScores] = {};
};

// Launches the first of the image's scores that takes the call. The device is current already.
Status launch(KernelImage const& image, AttnParams const& params, LaunchOptions const& options);

}  // namespace cutlass_attn
