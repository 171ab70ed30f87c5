// What the wgmma forward kernel is launched with: the tiles of ForwardParams, and where TMA finds
// Q, K and V.
//
// A block works on one tile after the other, and there is a block for every SM: it begins with the
// tile of its own number, and takes the next ones from a counter that all blocks share.
#pragma once

#include "core/forward_params.hpp"
#include "core/tensor_map.hpp"

namespace cutlass_attn {

struct TmaParams {
  // Rows that one copy of Q brings: those of a warpgroup.
  static constexpr int kBoxRows = 64;

  TensorMap q, k, v;
  ForwardParams forward;
  int32_t blocks;          // in the grid
  int32_t zeroes_counter;  // which lies in the workspace, and holds anything before the launch
  int32_t* counter;        // of tiles that were taken; null where each block has one
  char const* failure;     // why there are no maps

  // On the host.
  static TmaParams prepare(Problem const& p, Workspace const& workspace, DeviceLimits const& device,
                           KernelFacts const& facts) {
    TmaParams params = {{}, {}, {}, forward_of(p, facts), 0, 0, nullptr, nullptr};
    TileScheduler const& s = params.forward.scheduler;
    params.blocks = blocks_of(s.blocks, device);
    if (params.blocks < s.blocks) {
      params.zeroes_counter = workspace.zeros_bytes < kCounterBytes;
      params.counter =
          static_cast<int32_t*>(params.zeroes_counter ? workspace.data : workspace.zeros);
    }
    if (s.blocks == 0) return params;
    bool const is_on_gpu = device.compute_capability != 0;
    // Rows of Q are those of a group of heads: head in the group, query, group.
    int64_t const groups = p.num_heads_q / s.heads;
    Operand q = p.q;
    TensorView const views[] = {
        {address_of(q, p),
         {uint32_t(p.head_dim), uint32_t(s.heads), uint32_t(p.seq_q.seqlen), uint32_t(groups),
          uint32_t(p.batch)},
         {bytes(s.heads, q.head_stride), bytes(p.seq_q.seqlen, q.row_stride),
          bytes(groups, q.head_stride * s.heads), bytes(p.batch, q.batch_stride)},
         {64, uint32_t(s.heads), uint32_t(kBoxRows / s.heads), 1, 1}},
        keys_of(p, p.k, p.head_dim, facts),
        keys_of(p, p.v, p.head_dim_v, facts)};
    TensorMap* const maps[] = {&params.q, &params.k, &params.v};
    for (int i = 0; i < 3; ++i) {
      if (char const* failure = encode(views[i], is_on_gpu, *maps[i])) params.failure = failure;
    }
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    int64_t const tiles = forward_of(p, facts).scheduler.blocks;
    return blocks_of(tiles, device) < tiles ? kCounterBytes : 0;
  }

  Launch launch(KernelFacts const& facts) const {
    Launch launch{blocks, 1, facts.threads, facts.smem_bytes};
    if (zeroes_counter) launch.zeroed_bytes = kCounterBytes;
    launch.failure = failure;
    return launch;
  }

 private:
  static constexpr int64_t kCounterBytes = 4;

  // Heads are packed only in numbers that a copy can bring whole.
  static ForwardParams forward_of(Problem const& p, KernelFacts const& facts) {
    bool const packs = kBoxRows % TileScheduler::heads_of_tile(p, facts.block_m) == 0;
    return {p, TileScheduler(p, facts.block_m, packs), IntervalMask::divisor_of(p.mask)};
  }
  static int32_t blocks_of(int64_t tiles, DeviceLimits const& device) {
    int64_t const most = device.num_sms > 0 ? device.num_sms : tiles;
    return int32_t(tiles < most ? tiles : most);
  }

  static TensorView keys_of(Problem const& p, Operand const& t, int head_dim,
                            KernelFacts const& facts) {
    return {address_of(t, p),
            {uint32_t(head_dim), uint32_t(at_least_1(p.seq_k.seqlen)), uint32_t(p.num_heads_kv),
             uint32_t(p.batch), 1},
            {bytes(p.seq_k.seqlen, t.row_stride), bytes(p.num_heads_kv, t.head_stride),
             bytes(p.batch, t.batch_stride), 16},
            {64, uint32_t(facts.block_n), 1, 1, 1}};
  }
  static int32_t at_least_1(int32_t x) { return x < 1 ? 1 : x; }
  // Of no keys there may be no address either; none of them is read.
  static void const* address_of(Operand const& t, Problem const& p) {
    return t.data ? t.data : p.q.data;
  }
  // A stride along which no step is taken may be anything; TMA looks at it.
  static int64_t bytes(int64_t extent, int64_t stride) { return extent > 1 ? stride * 2 : 16; }
};

}  // namespace cutlass_attn
