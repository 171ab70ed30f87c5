// Launch parameters of the forward kernels: the problem, and which block computes which tile of
// queries. A kernel with other parameters defines a struct with this interface.
#pragma once

#include "core/launch.hpp"
#include "core/mask.hpp"
#include "core/problem.hpp"
#include "core/scheduler.hpp"

namespace cutlass_attn {

struct ForwardParams {
  Problem problem;
  TileScheduler scheduler;
  FastDivisor by_chunk;  // divides by the keys of an attention chunk

  // On the host. Works for any kernel with these facts, also one compiled by NVRTC.
  static ForwardParams prepare(Problem const& p, Workspace const&, DeviceLimits const&,
                               KernelFacts const& facts) {
    return {p, TileScheduler(p, facts.block_m, facts.packs_heads),
            IntervalMask::divisor_of(p.mask)};
  }
  static int64_t workspace_bytes(Problem const&, DeviceLimits const&, KernelFacts const&) {
    return 0;
  }
  // For MaskedParams.
  CA_HOST_DEVICE ForwardParams const& dense() const { return *this; }
  static TileScheduler scheduler_of(Problem const& p, KernelFacts const& facts) {
    return {p, facts.block_m, facts.packs_heads != 0};
  }
  // In a kernel. kHasChunks: whether the kernel runs calls with attention chunks.
  template <bool kHasChunks>
  CA_HOST_DEVICE IntervalMask mask(SeqLens const& seqlens) const {
    return IntervalMask(problem.mask, seqlens, by_chunk, kHasChunks);
  }
  // This block's tile.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE TileCoord tile() const {
    return tile_of<kBlockM, Arch>(Arch::block());
  }
  // The tile of any block of the grid.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE TileCoord tile_of(int block) const {
    return TileCoord(problem, scheduler, kBlockM, block);
  }
  Launch launch(KernelFacts const& facts) const {
    return {scheduler.blocks, 1, facts.threads, facts.smem_bytes};
  }
};

}  // namespace cutlass_attn
