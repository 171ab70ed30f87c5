// Arguments of the wgmma backward kernels: those of the mma.sync kernels, tensor maps of Q, dO, K
// and V, and the map of a mask.
#pragma once

#include "core/query_map.hpp"
#include "sm80/backward_params.hpp"
#include "sm90/tma_rows.hpp"

namespace cutlass_attn::sm90 {

template <class Rows>
struct BasicBackwardParams : sm80::BackwardParams {
  static constexpr int kBlockM = kTileRows;  // queries of a step

  Rows q, grad_o, k, v;
  char const* failure = nullptr;  // why the tensor maps could not be made

  static BasicBackwardParams prepare(Problem const& p, Workspace const& workspace,
                                     DeviceLimits const& device, KernelFacts const& facts) {
    BasicBackwardParams params;
    static_cast<sm80::BackwardParams&>(params) =
        sm80::BackwardParams::prepare(p, workspace, device, facts);
    // An eighth of the SMs of an H200. D = 128, 4 x 4096 takes 2566 us, and 3150 with 64. D = 64,
    // 16 x 1024 takes 3 to 4 % less, and causal as much more.
    params.begin_together(16);
    if (params.keys.all == 0 || params.queries.all == 0) return params;
    bool const is_on_gpu = device.compute_capability != 0;
    int const keys = facts.block_m;
    char const* const failures[] = {
        params.q.prepare(p, p.q, p.head_dim, p.seq_q, p.num_heads_q, kBlockM, is_on_gpu),
        params.grad_o.prepare(p, p.grad->o, p.head_dim_v, p.seq_q, p.num_heads_q, kBlockM,
                              is_on_gpu),
        params.k.prepare(p, p.k, p.head_dim, p.seq_k, p.num_heads_kv, keys, is_on_gpu),
        params.v.prepare(p, p.v, p.head_dim_v, p.seq_k, p.num_heads_kv, keys, is_on_gpu)};
    for (char const* failure : failures) {
      if (failure != nullptr) params.failure = failure;
    }
    return params;
  }

  Launch launch(KernelFacts const& facts) const {
    Launch launch = sm80::BackwardParams::launch(facts);
    launch.failure = failure;
    return launch;
  }
};

using BackwardParams = BasicBackwardParams<DenseRows>;
using VarlenBackwardParams = BasicBackwardParams<RaggedRows>;

// Dense calls with a bool mask. The launch before the kernel makes its map.
struct MaskBackwardParams : BackwardParams {
  using Base = BasicBackwardParams<DenseRows>;
  static constexpr int kTilesOfBlock = kAsideThreads / 32;  // of the map
  static_assert(kBlockM == QueryMap::kQueries);

  QueryMap map;

  static MaskBackwardParams prepare(Problem const& p, Workspace const& workspace,
                                    DeviceLimits const& device, KernelFacts const& facts) {
    void* const memory = static_cast<char*>(workspace.data) + base_bytes(p, device, facts);
    return {Base::prepare(p, workspace, device, facts),
            QueryMap::prepare(p, facts.block_m, memory)};
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    return base_bytes(p, device, facts) + QueryMap::prepare(p, facts.block_m, nullptr).bytes();
  }

  Launch launch_before(KernelFacts const& facts) const {
    Launch launch = Base::launch_before(facts);
    launch.blocks += (map.tiles() + kTilesOfBlock - 1) / kTilesOfBlock;
    return launch;
  }

 private:
  static int64_t base_bytes(Problem const& p, DeviceLimits const& device,
                            KernelFacts const& facts) {
    int64_t const bytes = Base::workspace_bytes(p, device, facts);
    return (bytes + QueryMap::kAlignment - 1) / QueryMap::kAlignment * QueryMap::kAlignment;
  }
};

}  // namespace cutlass_attn::sm90
