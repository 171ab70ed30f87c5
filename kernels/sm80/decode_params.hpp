// What the decode kernel is launched with: over how many blocks the keys of a tile of rows are
// split, and where those blocks leave what they have for the last of them.
#pragma once

#include <cstdint>

#include "core/divide.hpp"
#include "core/forward_params.hpp"

namespace cutlass_attn {

struct DecodeParams {
  // A split has at least so many keys, where the number of splits is the kernel's own choice: less
  // is not worth another block's prologue and its part of the merge.
  static constexpr int kMinKeys = 256;
  static constexpr int kMaxSplits = 256;

  ForwardParams forward;
  int32_t splits;  // blocks that share the keys of a tile of rows
  FastDivisor by_splits;
  FastDivisor by_page;   // keys of a page; by 1 without pages
  bool zeroes_counters;  // which lie in the workspace, and hold anything before the launch
  int32_t* counters;     // (tiles of rows) of the splits that are done
  float* partials;       // (tiles of rows, splits, partial_floats)

  // Of a split: O, not normalised, (block_m, head_dim_v) fp32, then row max and row sum of each
  // row.
  static CA_HOST_DEVICE int64_t partial_floats(int block_m, int head_dim_v) {
    return int64_t(block_m) * (head_dim_v + 2);
  }

  // On the host.
  static DecodeParams prepare(Problem const& p, Workspace const& workspace,
                              DeviceLimits const& device, KernelFacts const& facts) {
    ForwardParams const forward = ForwardParams::prepare(p, workspace, device, facts);
    int64_t const tiles = forward.scheduler.blocks;
    int splits = splits_of(p, tiles, device, facts);
    // The workspace was asked for before the kernel was compiled, perhaps, and by what was known
    // then.
    while (splits > 1 && bytes_of(p, tiles, splits, facts) > workspace.bytes) --splits;
    bool const zeroes_counters = workspace.zeros_bytes < counter_bytes(tiles);
    return {forward,
            splits,
            FastDivisor(splits),
            FastDivisor(p.kv.page_size > 0 ? p.kv.page_size : 1),
            zeroes_counters,
            static_cast<int32_t*>(zeroes_counters ? workspace.data : workspace.zeros),
            static_cast<float*>(workspace.data) + counters_of(tiles)};
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    int64_t const tiles = ForwardParams::prepare(p, {}, device, facts).scheduler.blocks;
    return bytes_of(p, tiles, splits_of(p, tiles, device, facts), facts);
  }

  static int32_t splits_of_keys(Problem const& p, DeviceLimits const& device,
                                KernelFacts const& facts) {
    int64_t const tiles = ForwardParams::prepare(p, {}, device, facts).scheduler.blocks;
    return splits_of(p, tiles, device, facts);
  }

  Launch launch(KernelFacts const& facts) const {
    int64_t const tiles = forward.scheduler.blocks;
    Launch launch{tiles * splits, 1, facts.threads, facts.smem_bytes};
    if (splits > 1 && zeroes_counters) launch.zeroed_bytes = counter_bytes(tiles);
    return launch;
  }

 private:
  // In units of 4 bytes, so many that what follows begins at 16.
  static int64_t counters_of(int64_t tiles) { return (tiles + 3) / 4 * 4; }
  static int64_t counter_bytes(int64_t tiles) {
    return counters_of(tiles) * int64_t(sizeof(int32_t));
  }

  static int64_t bytes_of(Problem const& p, int64_t tiles, int splits, KernelFacts const& facts) {
    if (splits == 1) return 0;
    return 4 * (counters_of(tiles) +
                tiles * splits * partial_floats(facts.block_m, padded(p.head_dim_v)));
  }
  // No kernel has a head dim that is further from that of the call.
  static int padded(int head_dim) { return (head_dim + 255) / 256 * 256; }

  // The most keys that a query sees, as far as the host knows.
  static int64_t keys_of(Problem const& p) {
    int64_t const right = p.mask.causal ? 0 : p.mask.window_right;
    int64_t keys = p.seq_k.seqlen;
    if (p.mask.window_left != kUnbounded && right != kUnbounded) {
      int64_t const window = int64_t(p.mask.window_left) + right + p.seq_q.seqlen;
      if (window < keys) keys = window;
    }
    if (p.mask.attention_chunk > 0 && p.mask.attention_chunk + p.seq_q.seqlen < keys) {
      keys = p.mask.attention_chunk + p.seq_q.seqlen;
    }
    return keys;
  }

  // As few splits as fill the GPU's SMs, of which each needs one block for as many bytes in flight
  // as memory can use, nearly as well as any number would.
  static int32_t splits_of(Problem const& p, int64_t tiles, DeviceLimits const& device,
                           KernelFacts const&) {
    if (p.num_splits > 0) return p.num_splits < kMaxSplits ? p.num_splits : kMaxSplits;
    if (tiles < 1 || device.num_sms < 1) return 1;
    int64_t const slots = device.num_sms;
    int64_t most = (keys_of(p) + kMinKeys - 1) / kMinKeys;
    if (most > kMaxSplits) most = kMaxSplits;
    auto const efficiency = [&](int64_t splits) {
      int64_t const blocks = tiles * splits;
      return float(blocks) / float((blocks + slots - 1) / slots * slots);
    };
    float best = 0.0f;
    for (int64_t n = 1; n <= most; ++n) best = efficiency(n) > best ? efficiency(n) : best;
    for (int64_t n = 1; n <= most; ++n) {
      if (efficiency(n) >= 0.97f * best) return int32_t(n);
    }
    return 1;
  }
};

}  // namespace cutlass_attn
