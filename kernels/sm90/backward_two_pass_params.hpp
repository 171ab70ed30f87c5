// Launch parameters of the two-pass backward kernels: those of the mma.sync kernels without a
// workspace for dQ, and tensor maps.
//
// The grid has two kinds of blocks: first the blocks with a tile of keys each, then the blocks with
// a tile of queries each. If no gradient of a kind is wanted, that kind has no blocks.
#pragma once

#include "sm90/tma_rows.hpp"
#include "tile/backward_params.hpp"

namespace cutlass_attn::sm90 {

template <class Rows>
struct BasicTwoPassParams : MmaBackwardParams {
  static constexpr int kKeys = 64, kQueries = 128;  // of a block
  static constexpr int kStepRows = 64;              // queries, or keys, of a step

  Rows q, grad_o, k, v;
  RowTiles query_tiles;
  TileOrder query_order;
  FastDivisor by_heads_per_kv;
  int64_t key_blocks, query_blocks;
  char const* failure = nullptr;  // why the tensor maps could not be made

  static BasicTwoPassParams prepare(Problem const& p, Workspace const& workspace,
                                    DeviceLimits const& device, KernelFacts const& facts) {
    BasicTwoPassParams params;
    WithoutGradQ const without(p);
    static_cast<MmaBackwardParams&>(params) =
        MmaBackwardParams::prepare(without.problem, workspace, device, facts);
    params.problem = p;
    params.grad = *p.grad;
    params.query_tiles = RowTiles(p.seq_q, p.batch, p.num_heads_q, kQueries);
    int32_t const tiles = params.query_tiles.each > 0 ? params.query_tiles.each : 1;
    int64_t const bytes = int64_t(p.seq_k.seqlen) * (p.head_dim + p.head_dim_v) * 2;
    params.query_order =
        TileOrder(tiles, params.query_tiles.all / tiles, TileOrder::tail_of(p.mask, bytes));
    params.by_heads_per_kv = FastDivisor(params.heads_per_kv > 0 ? params.heads_per_kv : 1);
    bool const wants_keys = p.grad->k.data || p.grad->v.data;
    params.key_blocks = wants_keys ? params.keys.all : 0;
    params.query_blocks = p.grad->q.data ? params.query_tiles.all : 0;
    if (params.keys.all == 0 || params.queries.all == 0) return params;
    bool const is_on_gpu = device.compute_capability != 0;
    char const* const failures[] = {
        params.q.prepare(p, p.q, p.head_dim, p.seq_q, p.num_heads_q, kStepRows, is_on_gpu),
        params.grad_o.prepare(p, p.grad->o, p.head_dim_v, p.seq_q, p.num_heads_q, kStepRows,
                              is_on_gpu),
        params.k.prepare(p, p.k, p.head_dim, p.seq_k, p.num_heads_kv, kStepRows, is_on_gpu),
        params.v.prepare(p, p.v, p.head_dim_v, p.seq_k, p.num_heads_kv, kStepRows, is_on_gpu)};
    for (char const* failure : failures) {
      if (failure != nullptr) params.failure = failure;
    }
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    return MmaBackwardParams::workspace_bytes(WithoutGradQ(p).problem, device, facts);
  }

  Launch launch(KernelFacts const& facts) const {
    Launch launch{key_blocks + query_blocks, 1, facts.threads, facts.smem_bytes};
    launch.failure = failure;
    return launch;
  }

  // In a kernel: index of the query tile of a block of the second kind. Under a causal mask, the
  // last queries, which see most keys, come first.
  CA_HOST_DEVICE int32_t query_tile_of(int32_t block) const {
    if (problem.seq_q.cu_seqlens) return block;
    TileOrder::Place const place = query_order.place(block);
    return place.head * query_order.tiles + query_order.tiles - 1 - place.turn;
  }

 private:
  // The call without dQ, because dQ needs no workspace.
  struct WithoutGradQ {
    Problem problem;
    Gradients grad;
    explicit WithoutGradQ(Problem const& p) : problem(p), grad(*p.grad) {
      grad.q.data = nullptr;
      problem.grad = &grad;
    }
    WithoutGradQ(WithoutGradQ const&) = delete;
  };
};

using TwoPassParams = BasicTwoPassParams<DenseRows>;
using VarlenTwoPassParams = BasicTwoPassParams<RaggedRows>;

}  // namespace cutlass_attn::sm90
