// Interface of a kernel, and its launch. Plain data for the host, the GPU and NVRTC.
#pragma once

#include <cstdint>

namespace cutlass_attn {

// Device limits that launches depend on.
struct DeviceLimits {
  int32_t compute_capability = 0;  // 89 for sm_89; 0 for the CPU
  int32_t num_sms = 0;             // number of streaming multiprocessors
  int32_t smem_per_sm = 0;         // shared memory of an SM, in bytes
  int32_t smem_per_block = 0;      // largest shared memory of a block, in bytes
};

// Facts that a compiled kernel exports.
struct KernelFacts {
  int32_t threads = 0;        // per block
  int32_t smem_bytes = 0;     // shared memory of a block
  int32_t block_m = 0;        // rows of a block's tile: queries, or keys in a backward pass
  int32_t packs_heads = 0;    // whether a tile may hold rows of several heads
  int32_t block_n = 0;        // keys of a tile, if the launch depends on it
  int32_t cluster = 1;        // most blocks of a cluster, if the launch chooses
  int32_t is_persistent = 0;  // whether a block takes tile after tile, if the launch depends on it
  int32_t overlaps = 0;       // whether its launch, and those before and after it, overlap
};

namespace arch {
struct Sm80;
}

// Kernels derive from this, and override what differs. The rest of their interface:
// simt/kernel_unit.hpp.
struct KernelDefaults {
  using Machine = arch::Sm80;
  static constexpr int kBlockN = 0;  // as in KernelFacts
  static constexpr int kMaxCluster = 1;
  static constexpr bool kPacksHeads = false, kIsPersistent = false;
  static constexpr bool kOverlapsGrids = false, kWaitsLater = false;  // arch/grid.hpp
};

template <class Kernel>
constexpr KernelFacts facts_of() {
  return {Kernel::kThreads, Kernel::kSmemBytes,  Kernel::kBlockM,       Kernel::kPacksHeads,
          Kernel::kBlockN,  Kernel::kMaxCluster, Kernel::kIsPersistent, Kernel::kOverlapsGrids};
}

// Memory shared by the kernels of a call, on the device that runs it.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
  // Memory that is zero before and after every kernel. run() provides it; there may be less than a
  // kernel would like.
  void* zeros = nullptr;
  int64_t zeros_bytes = 0;
};

struct Launch {
  int64_t blocks = 0;
  int32_t cluster = 1;  // blocks of a cluster
  int32_t threads = 0;
  int32_t smem_bytes = 0;
  // Whether the grid may start before earlier grids of its stream are complete (programmatic
  // dependent launch). The kernel then waits for them (arch/grid.hpp).
  bool overlaps = false;
  int64_t zeroed_bytes = 0;       // bytes of the workspace that are zeroed before the launch
  char const* failure = nullptr;  // why the kernel cannot be launched
};

}  // namespace cutlass_attn
