// Launch parameters and workspace of the mma.sync backward kernel, and of the launches before and
// after it.
//
// A block of the kernel has a tile of keys of a KV head. A block of the launches before and after
// has a tile of 64 queries of a query head. The workspace is ordered by tiles of 64 queries:
//
//   stats    (tile, query, 2) fp32                   -LSE in units of log2, -inf if the query does
//                                                    not exist or all its keys are masked; and
//                                                    delta = rowsum(dO O) - dLSE
//   grad_q   (tile, m16 block, n8 block, 128) fp32   dQ before softmax_scale, as accumulators
//   sinks    (tile) fp32                             sum of exp(sink - LSE) delta over the rows
//   turns    (tile, m16 block) int32                 if dQ is added in order: number of key tiles
//                                                    that have been added. Behind the last tile:
//                                                    the number of blocks that have begun
#pragma once

#include "core/divide.hpp"
#include "core/launch.hpp"
#include "core/mask.hpp"
#include "core/packed_tiles.hpp"
#include "core/problem.hpp"
#include "core/scheduler.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn {

// A tile of rows of a head: rows of its sequence from `begin` on.
struct RowTile {
  static constexpr int32_t kNone = 1 << 30;  // `begin` of a tile without rows
  int32_t batch, head, begin;
};

// All tiles of `rows` rows, in a linear order. `rows` is a constant in a kernel.
struct RowTiles {
  int32_t each;  // per head: of one sequence, or of all sequences if they are packed
  int32_t heads;
  int64_t all;
  FastDivisor by_each, by_heads;

  RowTiles() = default;
  RowTiles(Sequences const& s, int32_t batch, int32_t heads, int32_t rows)
      : each(int32_t(s.cu_seqlens ? PackedTiles::slots(s.total, 1, rows, batch)
                                  : (int64_t(s.seqlen) + rows - 1) / rows)),
        heads(heads),
        all(int64_t(each) * heads * (s.cu_seqlens ? 1 : batch)),
        by_each(each > 0 ? each : 1),
        by_heads(heads > 0 ? heads : 1) {}

  // Index of a tile. kIsVarlen: whether sequences may be packed.
  template <int kRows, bool kIsVarlen>
  CA_HOST_DEVICE int64_t number(Sequences const& s, RowTile const& tile) const {
    int const index = int(unsigned(tile.begin) / kRows);
    if (kIsVarlen && s.cu_seqlens) {
      PackedTiles const packed{s.cu_seqlens, 1, kRows};
      return int64_t(tile.head) * each + packed.first_slot(tile.batch) + index;
    }
    return (int64_t(tile.batch) * heads + tile.head) * each + index;
  }

  // The tile with this index. Called by all threads of a warp.
  template <int kRows, bool kIsVarlen, class Arch>
  CA_HOST_DEVICE RowTile tile(Sequences const& s, int32_t batches, int32_t number) const {
    int32_t const group = by_each(number), index = number - group * each;
    if (kIsVarlen && s.cu_seqlens) {
      PackedTiles const packed{s.cu_seqlens, 1, kRows};
      int32_t const batch = packed.template entry_of<Arch>(index, batches);
      if (index < packed.first_slot(batch)) return {batch, group, RowTile::kNone};
      return {batch, group, (index - packed.first_slot(batch)) * kRows};
    }
    int32_t const batch = by_heads(group);
    return {batch, group - batch * heads, index * kRows};
  }
};

struct MmaBackwardParams {
  static constexpr int kTileRows = 64;  // queries per tile of the workspace
  static constexpr int kPrePostThreads = 128;
  static constexpr int kTurns = kTileRows / 16;  // per tile
  static constexpr int kBiasRows = 16;           // rows of the bias gradient that a block zeroes

  Problem problem;
  Gradients grad;
  RowTiles queries, keys;
  FastDivisor by_chunk;
  int32_t heads_per_kv;
  int32_t columns;  // columns of grad_q in the workspace: the head dim, rounded up to 32
  float* stats;
  float* grad_q;  // null: not wanted
  float* sinks;   // null: not wanted
  int32_t* turns;
  // If dQ is added in order: number of heads that all begin a tile of keys before one of them
  // begins its next tile. With many heads, the few tiles of a head that run at a time wait for each
  // other once, at their beginning. With few heads, Q, dO and dQ are still in L2 when the next tile
  // reads them.
  int32_t group;
  FastDivisor by_group;
  int32_t zeroes_bias;  // whether the launch before zeroes the bias gradient
  TileOrder order;      // used if dQ is added in any order and sequences are not packed
  BiasOrder bias_order;

  // facts.block_m: keys per tile.
  static MmaBackwardParams prepare(Problem const& p, Workspace const& workspace,
                                   DeviceLimits const&, KernelFacts const& facts) {
    MmaBackwardParams params;
    params.problem = p;
    params.grad = *p.grad;
    params.queries = RowTiles(p.seq_q, p.batch, p.num_heads_q, kTileRows);
    params.keys = RowTiles(p.seq_k, p.batch, p.num_heads_kv, facts.block_m);
    params.by_chunk = IntervalMask::divisor_of(p.mask);
    params.heads_per_kv = p.num_heads_kv > 0 ? p.num_heads_q / p.num_heads_kv : 1;
    params.columns = columns_of(p);
    auto const floats = static_cast<float*>(workspace.data);
    int64_t const tiles = params.queries.all;
    params.stats = floats;
    params.grad_q = p.grad->q.data ? floats + tiles * (kTileRows * 2) : nullptr;
    params.sinks = p.grad->sinks ? floats + tiles * floats_of_rows(p) : nullptr;
    params.turns = reinterpret_cast<int32_t*>(floats + tiles * (floats_of_rows(p) + 1));
    params.begin_together(64);
    int32_t const tiles_of_head = params.tiles_of_head();
    params.zeroes_bias = bool(p.grad->bias);
    params.bias_order = BiasOrder::of(p);
    // Q and dO, which the blocks of a KV head read.
    int64_t const bytes = int64_t(p.seq_q.seqlen) * (p.head_dim + p.head_dim_v) * 2;
    params.order = TileOrder(tiles_of_head, params.keys.all / tiles_of_head,
                             TileOrder::tail_of(p.mask, bytes * params.heads_per_kv));
    return params;
  }

  void begin_together(int32_t heads) {
    group = heads;
    by_group = FastDivisor(heads * tiles_of_head());
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const&, KernelFacts const&) {
    RowTiles const queries(p.seq_q, p.batch, p.num_heads_q, kTileRows);
    int64_t const floats = queries.all * (floats_of_rows(p) + 1);
    return (floats + queries.all * kTurns + 1) * int64_t(sizeof(float));
  }

  // One block per tile of queries, then blocks that zero the bias gradient.
  CA_HOST_DEVICE int64_t blocks_before() const {
    return queries.all + (zeroes_bias ? (bias_rows() + kBiasRows - 1) / kBiasRows : 0);
  }
  Launch launch_before(KernelFacts const&) const {
    Launch launch{blocks_before(), 1, kPrePostThreads, 1024};
    // BackwardStep::row() counts the rows of a KV head's queries in 32 bits.
    if (int64_t(heads_per_kv) * queries.each > (int64_t(1) << 32) / kTileRows) {
      launch.failure =
          "seqlen_q, or total + 64 x batch of packed q, times num_heads_q / num_heads_kv is more "
          "than 4294967296: split the batch or the heads";
    }
    return launch;
  }
  Launch launch(KernelFacts const& facts) const {
    return {keys.all, 1, facts.threads, facts.smem_bytes};
  }
  // One block per tile of queries, then one per query head for its sink.
  Launch launch_after(KernelFacts const&) const {
    int64_t const tiles = grad_q ? queries.all : 0, heads = sinks ? queries.heads : 0;
    return {tiles + heads, 1, kPrePostThreads, 1024};
  }

  // In a kernel.
  template <bool kHasChunks>
  CA_HOST_DEVICE IntervalMask mask(SeqLens const& seqlens) const {
    return IntervalMask(problem.mask, seqlens, by_chunk, kHasChunks);
  }
  // Index of a block's tile of keys.
  CA_HOST_DEVICE int32_t tile_of_block(int32_t block) const {
    if (problem.seq_k.cu_seqlens) return block;
    TileOrder::Place const place = bias_order.place(order.place(block), keys.heads);
    return place.head * order.tiles + place.turn;
  }
  // Index of the tile of keys of the block with this ticket.
  CA_HOST_DEVICE int32_t tile_of(int32_t ticket) const {
    int32_t const first = by_group(ticket) * group;
    int32_t const heads = int32_t(keys.all / tiles_of_head());
    int32_t const size = heads - first < group ? heads - first : group;
    int32_t const place = ticket - first * keys.each, tile = place / size;
    return (first + place - tile * size) * keys.each + tile;
  }
  CA_HOST_DEVICE int32_t tiles_of_head() const { return keys.each > 0 ? keys.each : 1; }
  // Counter of blocks that have begun.
  CA_HOST_DEVICE int32_t* tickets() const { return turns + queries.all * kTurns; }
  CA_HOST_DEVICE int32_t* turn_at(int64_t tile, int query) const {
    return turns + tile * kTurns + unsigned(query) % kTileRows / 16;
  }

  // Rows of keys in the bias gradient: the product of the dimensions that are not broadcast.
  CA_HOST_DEVICE int64_t bias_rows() const {
    PerLogit const& t = grad.bias;
    return int64_t(t.batch_stride == 0 ? 1 : problem.batch) *
           (t.head_stride == 0 ? 1 : problem.num_heads_q) *
           (t.row_stride == 0 ? 1 : problem.seq_q.seqlen);
  }

  // Address of the m16 block of dQ that begins at `query`, in workspace tile `tile`.
  CA_HOST_DEVICE float* grad_q_at(int64_t tile, int query) const {
    return grad_q + (tile * kTileRows + unsigned(query) % kTileRows / 16 * 16) * columns;
  }

 private:
  static int32_t columns_of(Problem const& p) { return (p.head_dim + 31) / 32 * 32; }
  static int64_t floats_of_rows(Problem const& p) {
    return kTileRows * (2 + (p.grad->q.data ? columns_of(p) : 0));
  }
};

}  // namespace cutlass_attn
