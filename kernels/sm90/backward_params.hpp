// Launch parameters of the wgmma backward kernels: those of the mma.sync kernels, tensor maps of Q,
// dO, K, V and a bias, and the query map of a mask.
#pragma once

#include "core/query_map.hpp"
#include "sm90/params.hpp"
#include "sm90/tma_rows.hpp"
#include "tile/backward_params.hpp"

namespace cutlass_attn::sm90 {

template <class Rows>
struct BasicBackwardParams : MmaBackwardParams {
  static constexpr int kBlockM = kTileRows;  // queries of a step; rows of a copy

  Rows q, grad_o, k, v;
  int32_t blocks = 0;             // of the grid, if blocks are persistent
  char const* failure = nullptr;  // why the tensor maps could not be made

  static BasicBackwardParams prepare(Problem const& p, Workspace const& workspace,
                                     DeviceLimits const& device, KernelFacts const& facts) {
    BasicBackwardParams params;
    static_cast<MmaBackwardParams&>(params) =
        MmaBackwardParams::prepare(p, workspace, device, facts);
    // An eighth of the SMs of an H200. D = 128, 4 x 4096 takes 2566 us; with 64 it takes 3150. D =
    // 64, 16 x 1024 takes 3 to 4 % less, and causal 3 to 4 % more.
    params.begin_together(16);
    if (facts.is_persistent) params.blocks = PersistentTiles::blocks_of(params.keys.all, device);
    if (params.keys.all == 0 || params.queries.all == 0) return params;
    bool const is_on_gpu = device.compute_capability != 0;
    char const* const failures[] = {
        params.q.prepare(p, p.q, p.head_dim, p.seq_q, p.num_heads_q, kBlockM, is_on_gpu),
        params.grad_o.prepare(p, p.grad->o, p.head_dim_v, p.seq_q, p.num_heads_q, kBlockM,
                              is_on_gpu),
        params.k.prepare(p, p.k, p.head_dim, p.seq_k, p.num_heads_kv, kBlockM, is_on_gpu),
        params.v.prepare(p, p.v, p.head_dim_v, p.seq_k, p.num_heads_kv, kBlockM, is_on_gpu)};
    for (char const* failure : failures) {
      if (failure != nullptr) params.failure = failure;
    }
    return params;
  }

  Launch launch(KernelFacts const& facts) const {
    Launch launch = MmaBackwardParams::launch(facts);
    if (facts.is_persistent) launch.blocks = blocks;
    launch.failure = failure;
    return launch;
  }
};

using BackwardParams = BasicBackwardParams<DenseRows>;
using VarlenBackwardParams = BasicBackwardParams<RaggedRows>;

// For dense calls with a bool mask. The launch before the kernel makes the query map.
struct MaskBackwardParams : BackwardParams {
  using Base = BasicBackwardParams<DenseRows>;
  static constexpr int kTilesOfBlock = kPrePostThreads / 32;  // of the map
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

// For dense calls with a bias, whose tiles TMA copies as well. Base: parameters without a bias.
template <class Base>
struct WithBias : Base {
  TensorMap bias;

  static WithBias prepare(Problem const& p, Workspace const& workspace, DeviceLimits const& device,
                          KernelFacts const& facts) {
    WithBias params = {Base::prepare(p, workspace, device, facts), {}};
    if (params.keys.all == 0 || params.queries.all == 0) return params;
    static_assert(kBoxRows == Base::kBlockM);
    char const* const failure =
        encode(bias_of(p, 1, false), device.compute_capability != 0, params.bias);
    if (failure != nullptr) params.failure = failure;
    return params;
  }
};
// A tile of the gradient of a bias, and the steps that it sums over: batch entries, heads, and
// tiles of queries.
struct BiasTile {
  int32_t batch, head;  // of the first step
  int32_t first_key, first_query;
  int32_t query_tiles, steps_of_batch, steps;

  // Drops tiles of queries that see no key.
  CA_HOST_DEVICE void keep(TileRange const& range, int block_m) {
    int32_t const tiles = steps_of_batch, first = first_query / block_m, end = first + query_tiles;
    int32_t const begin = range.begin > first ? range.begin : first;
    int32_t const kept = (range.end < end ? range.end : end) - begin;
    int32_t const heads = tiles / query_tiles, entries = steps / tiles;
    query_tiles = kept > 0 ? kept : 0;
    first_query = begin * block_m;
    steps_of_batch = heads * query_tiles, steps = entries * steps_of_batch;
  }
};

// Adds blocks that compute the gradient of the bias (backward_bias.hpp).
template <class Base>
struct WithBiasGrad : Base {
  static constexpr int kBiasQueries = 128, kBiasKeys = 128;  // of a block's tile

  // A broadcast dimension counts as one.
  int32_t bias_tiles_k = 0, bias_tiles_q = 0, bias_heads = 0, bias_batch = 0;
  int32_t bias_tiles_of_block = 0;

  static WithBiasGrad prepare(Problem const& p, Workspace const& workspace,
                              DeviceLimits const& device, KernelFacts const& facts) {
    WithBiasGrad params = {Base::prepare(p, workspace, device, facts)};
    params.zeroes_bias = 0;
    PerLogit const& to = p.grad->bias;
    params.bias_tiles_k = (p.seq_k.seqlen + kBiasKeys - 1) / kBiasKeys;
    params.bias_tiles_q =
        to.row_stride == 0 ? 1 : (p.seq_q.seqlen + kBiasQueries - 1) / kBiasQueries;
    params.bias_heads = to.head_stride == 0 ? 1 : p.num_heads_q;
    params.bias_batch = to.batch_stride == 0 ? 1 : p.batch;
    // At least four blocks per SM, so that the last blocks end at about one time, but with few
    // tiles each, because a new block waits for its first tiles.
    int32_t const blocks = 4 * (device.num_sms > 0 ? device.num_sms : 1);
    int32_t const tiles = params.bias_tiles() / blocks;
    params.bias_tiles_of_block = tiles < 1 ? 1 : tiles < 16 ? tiles : 16;
    return params;
  }

  Launch launch(KernelFacts const& facts) const {
    Launch launch = Base::launch(facts);
    launch.blocks += bias_blocks();
    return launch;
  }

  CA_HOST_DEVICE int32_t bias_blocks() const {
    return (bias_tiles() + bias_tiles_of_block - 1) / bias_tiles_of_block;
  }
  // Number of bias blocks among the first `block` blocks of the grid. They are spread evenly: L2
  // limits them more than the other blocks.
  CA_HOST_DEVICE int32_t bias_blocks_before(int32_t block) const {
    int64_t const of_bias = bias_blocks();
    return int32_t(block * of_bias / (this->keys.all + of_bias));
  }
  CA_HOST_DEVICE int32_t bias_tiles() const {
    return bias_batch * bias_heads * bias_tiles_q * bias_tiles_k;
  }

  // In a kernel. Tiles are ordered by key tile, then query tile, head, batch entry.
  CA_HOST_DEVICE BiasTile bias_tile(int32_t number) const {
    Problem const& p = this->problem;
    BiasTile tile;
    int32_t const row = number / bias_tiles_k, group = row / bias_tiles_q;
    tile.first_key = (number - row * bias_tiles_k) * kBiasKeys;
    tile.first_query = (row - group * bias_tiles_q) * kBiasQueries;
    tile.batch = group / bias_heads;
    tile.head = group - tile.batch * bias_heads;
    bool const shares_rows = this->grad.bias.row_stride == 0;
    tile.query_tiles = shares_rows ? (p.seq_q.seqlen + kBiasQueries - 1) / kBiasQueries : 1;
    tile.steps_of_batch = tile.query_tiles * (bias_heads == 1 ? p.num_heads_q : 1);
    tile.steps = tile.steps_of_batch * (bias_batch == 1 ? p.batch : 1);
    return tile;
  }
};

using BiasBackwardParams = WithBias<BackwardParams>;
using BiasMaskBackwardParams = WithBias<MaskBackwardParams>;
using BiasGradBackwardParams = WithBiasGrad<BiasBackwardParams>;
using BiasGradMaskBackwardParams = WithBiasGrad<BiasMaskBackwardParams>;

}  // namespace cutlass_attn::sm90
