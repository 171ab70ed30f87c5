// Launch parameters of a dense kernel for calls with a bool mask. A launch before the kernel makes
// the mask map (tile/mask_map.hpp) in the workspace.
#pragma once

#include "core/bias_params.hpp"
#include "core/mask_map.hpp"

namespace cutlass_attn {

// Base: parameters of the kernel without a mask. It has
//   ForwardParams const& dense() const;  // its tiles
//   static TileScheduler scheduler_of(Problem const&, KernelFacts const&);
// and takes at most MaskMap::kAlignment bytes of workspace.
template <class Base>
struct MaskedParams : Base {
  MaskMap map;

  static MaskedParams prepare(Problem const& p, Workspace const& workspace,
                              DeviceLimits const& device, KernelFacts const& facts) {
    return {Base::prepare(p, workspace, device, facts),
            map_of(p, facts, static_cast<char*>(workspace.data) + kBaseBytes)};
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const&, KernelFacts const& facts) {
    return kBaseBytes + map_of(p, facts, nullptr).bytes();
  }

  Launch launch_before(KernelFacts const&) const {
    return {map.rows() * map.num_words * 4, 1, MaskMap::kThreads, MaskMap::smem_bytes(map.block_m)};
  }
  Launch launch_after(KernelFacts const&) const { return {}; }

 private:
  static constexpr int64_t kBaseBytes = MaskMap::kAlignment;

  static MaskMap map_of(Problem const& p, KernelFacts facts, void* memory) {
    // All kernels with these parameters pack heads, also those not compiled yet
    facts.packs_heads = 1;
    return MaskMap::prepare(p, Base::scheduler_of(p, facts), facts.block_m, facts.block_n, memory);
  }
};

using MaskForwardParams = MaskedParams<ForwardParams>;
using BiasMaskForwardParams = MaskedParams<BiasForwardParams>;

}  // namespace cutlass_attn
