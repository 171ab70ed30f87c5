// Launch parameters of the wgmma forward kernels: tiles of ForwardParams or VarlenParams, and
// tensor maps of Q, K, V and a bias.
//
// The grid is persistent, with one block per SM. A block starts with the tile of its own index and
// fetches further tiles from a counter that all blocks share. The host knows the number of tiles;
// with packed sequences some tiles have no rows.
#pragma once

#include "core/masked_params.hpp"
#include "core/varlen_params.hpp"
#include "sm90/tma_rows.hpp"

namespace cutlass_attn {

namespace sm90 {

// Rows of one copy of Q: those of a warpgroup.
inline constexpr int kBoxRows = 64;

inline int32_t heads_of(ForwardParams const& x) { return x.scheduler.heads; }
inline int32_t heads_of(VarlenParams const& x) { return x.heads; }

// Tiles of a call, on the host. Heads are packed only if their number divides the rows of a copy.
template <class Tiles>
Tiles tiles_of(Problem const& p, KernelFacts facts) {
  Tiles const tiles = Tiles::prepare(p, {}, {}, facts);
  if (kBoxRows % heads_of(tiles) == 0) return tiles;
  facts.packs_heads = 0;
  return Tiles::prepare(p, {}, {}, facts);
}

// Q in boxes of 64 columns. Dimensions: column, head in its group of `heads` heads, query, group,
// batch entry.
inline TensorView queries_of(Problem const& p, int32_t heads) {
  Operand const& q = p.q;
  int32_t const rows = p.seq_q.rows();
  int64_t const groups = p.num_heads_q / heads;
  return {
      q.data,
      {uint32_t(p.head_dim), uint32_t(heads), uint32_t(rows), uint32_t(groups), uint32_t(p.batch)},
      {stride_bytes(heads, q.head_stride), stride_bytes(rows, q.row_stride),
       stride_bytes(groups, q.head_stride * heads), stride_bytes(p.batch, q.batch_stride)},
      {64, uint32_t(heads), uint32_t(kBoxRows / heads), 1, 1}};
}

// The bias in boxes of 64 keys, with the rows of Q or with one row for all. Dimensions: key, head
// in the group, query, group, batch entry.
inline TensorView bias_of(Problem const& p, int32_t heads, bool shares_rows) {
  PerLogit const& bias = p.logits.bias;
  int32_t const queries = p.seq_q.seqlen, groups = p.num_heads_q / heads;
  int32_t const keys = p.seq_k.seqlen > 1 ? p.seq_k.seqlen : 1;
  return {
      bias.data,
      {uint32_t(keys), uint32_t(heads), uint32_t(queries), uint32_t(groups), uint32_t(p.batch)},
      {stride_bytes(heads, bias.head_stride), stride_bytes(queries, bias.row_stride),
       stride_bytes(groups, bias.head_stride * heads), stride_bytes(p.batch, bias.batch_stride)},
      {64, uint32_t(shares_rows ? 1 : heads), uint32_t(shares_rows ? 1 : kBoxRows / heads), 1, 1}};
}

}  // namespace sm90

// The tiles of a persistent grid.
struct PersistentTiles {
  int32_t tiles;
  int32_t blocks;          // of the grid
  int32_t zeroes_counter;  // whether the counter is in the workspace and the launch clears it
  int32_t* counter;        // tiles fetched so far; null if each block has one tile
  char const* failure;     // why the tensor maps could not be made

  static constexpr int64_t kCounterBytes = 4;

  // On the host. Sets `failure` if there are too many tiles.
  static PersistentTiles prepare(int64_t tiles, Workspace const& workspace,
                                 DeviceLimits const& device) {
    PersistentTiles all = {};
    if (tiles > INT32_MAX) {
      all.failure = "the call needs more than 2147483647 tiles: split the batch";
      return all;
    }
    all.tiles = int32_t(tiles);
    all.blocks = blocks_of(tiles, device);
    if (all.blocks < all.tiles) {
      all.zeroes_counter = workspace.zeros_bytes < kCounterBytes;
      all.counter = static_cast<int32_t*>(all.zeroes_counter ? workspace.data : workspace.zeros);
    }
    return all;
  }
  static int32_t blocks_of(int64_t tiles, DeviceLimits const& device) {
    int64_t const most = device.num_sms > 0 ? device.num_sms : tiles;
    return int32_t(tiles < most ? tiles : most);
  }
  void set_failure(char const* reason) {
    if (reason != nullptr) failure = reason;
  }

  Launch launch(KernelFacts const& facts) const {
    Launch launch{blocks, 1, facts.threads, facts.smem_bytes};
    if (zeroes_counter) launch.zeroed_bytes = kCounterBytes;
    launch.failure = failure;
    return launch;
  }
};

template <class Tiles, class Rows>
struct BasicTmaParams : PersistentTiles {
  TensorMap q;
  Rows k, v;
  Tiles forward;

  // In a kernel: the tile with this index.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE auto tile_of(int number) const {
    return forward.template tile_of<kBlockM, Arch>(number);
  }

  // For MaskedParams, whose workspace has the counter before the map.
  CA_HOST_DEVICE Tiles const& dense() const { return forward; }
  static TileScheduler scheduler_of(Problem const& p, KernelFacts const& facts) {
    return sm90::tiles_of<Tiles>(p, facts).scheduler;
  }

  // On the host.
  static BasicTmaParams prepare(Problem const& p, Workspace const& workspace,
                                DeviceLimits const& device, KernelFacts const& facts) {
    BasicTmaParams params = {{}, {}, {}, {}, sm90::tiles_of<Tiles>(p, facts)};
    static_cast<PersistentTiles&>(params) =
        PersistentTiles::prepare(params.forward.launch(facts).blocks, workspace, device);
    if (params.tiles == 0) return params;
    bool const is_on_gpu = device.compute_capability != 0;
    char const* const failures[] = {
        encode(sm90::queries_of(p, sm90::heads_of(params.forward)), is_on_gpu, params.q),
        params.k.prepare(p, p.k, p.head_dim, p.seq_k, p.num_heads_kv, facts.block_n, is_on_gpu),
        params.v.prepare(p, p.v, p.head_dim_v, p.seq_k, p.num_heads_kv, facts.block_n, is_on_gpu)};
    for (char const* failure : failures) params.set_failure(failure);
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    int64_t const tiles = sm90::tiles_of<Tiles>(p, facts).launch(facts).blocks;
    return blocks_of(tiles, device) < tiles ? kCounterBytes : 0;
  }
};

using TmaParams = BasicTmaParams<ForwardParams, sm90::DenseRows>;
using VarlenTmaParams = BasicTmaParams<VarlenParams, sm90::RaggedRows>;
using PagedTmaParams = BasicTmaParams<VarlenParams, sm90::PagedRows>;

// For dense calls with a bias, whose tiles TMA copies as well.
struct BiasTmaParams : TmaParams {
  TensorMap bias;
  BiasOrder order;
  int32_t shares_rows;  // whether all rows of a tile share one row of bias
  int32_t bias_bytes;   // copied with a key tile

  static BiasTmaParams prepare(Problem const& p, Workspace const& workspace,
                               DeviceLimits const& device, KernelFacts const& facts) {
    PerLogit const& bias = p.logits.bias;
    BiasTmaParams params = {
        TmaParams::prepare(p, workspace, device, facts), {}, BiasOrder::of(p), 0, 0};
    int32_t const heads = params.forward.scheduler.heads;
    params.shares_rows = bias.row_stride == 0 && (heads == 1 || bias.head_stride == 0);
    params.bias_bytes = (params.shares_rows ? 1 : facts.block_m) * facts.block_n * 2;
    if (params.tiles == 0) return params;
    params.set_failure(encode(sm90::bias_of(p, heads, params.shares_rows),
                              device.compute_capability != 0, params.bias));
    return params;
  }

  template <int kBlockM, class Arch>
  CA_HOST_DEVICE TileCoord tile_of(int number) const {
    TileScheduler const& scheduler = forward.scheduler;
    return TileCoord(forward.problem, scheduler, kBlockM,
                     order.place(scheduler.order.place(number), scheduler.groups));
  }
};

// For dense calls with a bool mask, without or with a bias.
using MaskTmaParams = MaskedParams<TmaParams>;
using BiasMaskTmaParams = MaskedParams<BiasTmaParams>;

}  // namespace cutlass_attn
