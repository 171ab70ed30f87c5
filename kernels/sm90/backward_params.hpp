// What the wgmma backward kernel is launched with: what that on mma.sync is, and where TMA finds Q,
// dO, K and V.
#pragma once

#include "sm80/backward_params.hpp"
#include "sm90/keys.hpp"

namespace cutlass_attn::sm90 {

struct BackwardParams : sm80::BackwardParams {
  static constexpr int kBlockM = kTileRows;  // queries of a step

  TensorMap q, grad_o, k, v;
  char const* failure = nullptr;  // why there are no maps

  static BackwardParams prepare(Problem const& p, Workspace const& workspace,
                                DeviceLimits const& device, KernelFacts const& facts) {
    BackwardParams params;
    static_cast<sm80::BackwardParams&>(params) =
        sm80::BackwardParams::prepare(p, workspace, device, facts);
    if (params.keys.all == 0 || params.queries.all == 0) return params;
    bool const is_on_gpu = device.compute_capability != 0;
    auto const map = [&](Operand const& t, int columns, Sequences const& rows, int heads, int box,
                         TensorMap& to) {
      if (params.failure == nullptr) {
        params.failure = encode(dense_view(p, t, columns, rows, heads, box), is_on_gpu, to);
      }
    };
    map(p.q, p.head_dim, p.seq_q, p.num_heads_q, kBlockM, params.q);
    map(p.grad->o, p.head_dim_v, p.seq_q, p.num_heads_q, kBlockM, params.grad_o);
    map(p.k, p.head_dim, p.seq_k, p.num_heads_kv, facts.block_m, params.k);
    map(p.v, p.head_dim_v, p.seq_k, p.num_heads_kv, facts.block_m, params.v);
    return params;
  }

  Launch launch(KernelFacts const& facts) const {
    Launch launch = sm80::BackwardParams::launch(facts);
    launch.failure = failure;
    return launch;
  }
};

}  // namespace cutlass_attn::sm90
