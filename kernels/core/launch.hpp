// The interface of a kernel and its launch. Plain data, for host, GPU and run-time compiler.
#pragma once

#include <cstdint>

namespace cutlass_attn {

// Limits of a GPU on which launches depend.
struct DeviceLimits {
  int32_t compute_capability = 0;  // 89 for sm_89; 0 for the CPU
  int32_t num_sms = 0;             // streaming multiprocessors
  int32_t smem_per_sm = 0;         // bytes of shared memory of each
  int32_t smem_per_block = 0;      // the most that one block may have
};

// Facts that a compiled kernel exports.
struct KernelFacts {
  int32_t threads = 0;      // of a block
  int32_t smem_bytes = 0;   // of shared memory
  int32_t block_m = 0;      // rows of a block's tile: queries, or keys in a backward pass
  int32_t packs_heads = 0;  // whether these rows may be of several heads
  int32_t block_n = 0;      // keys of a tile, if the launch depends on it
};

namespace detail {
template <class Kernel>
constexpr auto block_n_of(int) -> decltype(int32_t(Kernel::kBlockN)) {
  return Kernel::kBlockN;
}
template <class Kernel>
constexpr int32_t block_n_of(...) {
  return 0;
}
}  // namespace detail

template <class Kernel>
constexpr KernelFacts facts_of() {
  return {Kernel::kThreads, Kernel::kSmemBytes, Kernel::kBlockM, Kernel::kPacksHeads,
          detail::block_n_of<Kernel>(0)};
}

// Memory that a call's kernels share, on the device that runs the call.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
  // Zeroed memory, which kernels leave zeroed; it may be less than a kernel wants. run() provides
  // it.
  void* zeros = nullptr;
  int64_t zeros_bytes = 0;
};

struct Launch {
  int64_t blocks = 0;
  int32_t cluster = 1;  // blocks that run together and see each other's shared memory
  int32_t threads = 0;
  int32_t smem_bytes = 0;
  // Whether the grid may begin before previous grids of its stream are complete. Its kernel waits
  // for them (arch/grid.hpp).
  bool overlaps = false;
  int64_t zeroed_bytes = 0;       // of the workspace, zeroed before the launch
  char const* failure = nullptr;  // why the kernel cannot be launched
};

}  // namespace cutlass_attn
