// Splits: blocks that share the keys of a tile of rows. Defines the keys of a split, and where a
// split stores its partial result for the last block, or a later launch, to merge.
#pragma once

#include <cstdint>

#include "core/divide.hpp"
#include "core/forward_params.hpp"

namespace cutlass_attn {

struct KeySplits {
  static constexpr int kMax = 256;

  int32_t count;       // blocks that share the keys of a tile of rows
  int32_t tiles_each;  // key tiles of a split; the last split has the rest. 0: split evenly
  FastDivisor by_count;
  bool zeroes_counters;  // the counters are in the workspace, uninitialised before the launch
  int32_t* counters;     // (tiles of rows): finished splits
  float* partials;       // (tiles of rows, splits, partial_floats)

  // Floats of a split: O, not normalised, (block_m, head_dim_v), then row max and row sum of each
  // row.
  static constexpr CA_HOST_DEVICE int64_t partial_floats(int block_m, int head_dim_v) {
    return int64_t(block_m) * (head_dim_v + 2);
  }

  // Numbers that determine the size of the workspace.
  struct Size {
    int64_t tiles;  // of rows
    int32_t count;
    int64_t partial;           // floats per split
    int32_t tiles_each = 0;    // key tiles of a split of fixed size
    bool has_counters = true;  // whether the last block of a tile merges

    // In units of 4 bytes, rounded up to 16 bytes, so that `partials` is aligned.
    int64_t counters() const { return has_counters ? (tiles + 3) / 4 * 4 : 0; }
    int64_t bytes() const { return count == 1 ? 0 : 4 * (counters() + tiles * count * partial); }
  };

  // The workspace may have been allocated before the kernel was compiled, with less information. So
  // the number of splits is limited to what fits.
  KeySplits(Size size, Workspace const& workspace) {
    count = size.count;
    while (size.count > 1 && size.bytes() > workspace.bytes) --size.count;
    tiles_each = size.count == count ? size.tiles_each : 0;
    count = size.count;
    by_count = FastDivisor(count);
    zeroes_counters = workspace.zeros_bytes < size.counters() * int64_t(sizeof(int32_t));
    counters = static_cast<int32_t*>(zeroes_counters ? workspace.data : workspace.zeros);
    partials = static_cast<float*>(workspace.data) + size.counters();
  }

  // Launch of a kernel with these splits of `tiles` tiles of rows.
  Launch launch(int64_t tiles, KernelFacts const& facts) const {
    Launch launch{tiles * count, 1, facts.threads, facts.smem_bytes};
    Size const size{tiles, count, 0};
    if (count > 1 && zeroes_counters) launch.zeroed_bytes = 4 * size.counters();
    return launch;
  }

  // In a kernel: tile of rows (unit) and split of a block of the grid.
  CA_HOST_DEVICE int unit(int block) const { return by_count(block); }
  CA_HOST_DEVICE int split(int block) const { return block - unit(block) * count; }

  // A split's share of these key tiles.
  CA_HOST_DEVICE TileRange share(TileRange const& all, int split) const {
    int const tiles = all.end > all.begin ? all.end - all.begin : 0;
    if (tiles_each > 0) {
      int const begin = all.begin + split * tiles_each, end = begin + tiles_each;
      bool const is_last = split == count - 1 || end > all.end;
      return {begin < all.end ? begin : all.end, is_last ? all.end : end, all.full_begin,
              all.full_end};
    }
    return {all.begin + first(tiles, split), all.begin + first(tiles, split + 1), all.full_begin,
            all.full_end};
  }

  CA_HOST_DEVICE float* partial(int unit, int split, int64_t floats) const {
    return partials + (int64_t(unit) * count + split) * floats;
  }

  // Whether this block is the last of its tile of rows to finish. All blocks of the tile have then
  // stored their results. ticket: unused shared memory.
  template <class Arch>
  CA_HOST_DEVICE bool is_last(int unit, int32_t& ticket) const {
    Arch::sync();  // results of all threads stored
    if (Arch::thread() == 0) ticket = Arch::atom_add_acq_rel(&counters[unit], 1);
    Arch::sync();  // ticket full
    if (ticket != count - 1) return false;
    if (Arch::thread() == 0) counters[unit] = 0;  // for the next call
    return true;
  }

 private:
  // First of `tiles` key tiles of split i.
  CA_HOST_DEVICE int first(int tiles, int i) const {
    int const each = by_count(tiles), more = tiles - each * count;
    return each * i + (i < more ? i : more);
  }
};

// Upper bound, computed on the host, of the keys that any `queries` consecutive rows see together.
inline int64_t max_keys(Problem const& p, int queries) {
  int64_t const right = p.mask.causal ? 0 : p.mask.window_right;
  int64_t keys = p.seq_k.seqlen;
  if (p.mask.window_left != kUnbounded && right != kUnbounded) {
    int64_t const window = int64_t(p.mask.window_left) + right + queries;
    if (window < keys) keys = window;
  }
  // Rows of neighbouring chunks see both chunks; in a causal call only up to their own key.
  int64_t const chunks = (right == 0 ? 1 : 2) * int64_t(p.mask.attention_chunk) + queries;
  if (p.mask.attention_chunk > 0 && chunks < keys) keys = chunks;
  return keys;
}

// Most splits of p.split_size keys for the keys of a tile of rows. A window or chunk may begin
// inside a tile of up to 64 keys.
inline int32_t splits_of_size(Problem const& p) {
  int64_t keys = max_keys(p, p.seq_q.seqlen) + 63;
  if (keys > p.seq_k.seqlen) keys = p.seq_k.seqlen;
  return int32_t((keys + p.split_size - 1) / p.split_size);
}

// Size of a call's splits. Choice determines their number:
//   static int32_t splits(Problem const&, int64_t tiles, DeviceLimits const&, KernelFacts const&);
//   static constexpr int kMaxHeadDim;  // largest head dim of its kernels
//   static constexpr int kTileKeys;    // keys of their tiles
template <class Choice>
KeySplits::Size size_of_splits(Problem const& p, int64_t tiles, DeviceLimits const& device,
                               KernelFacts const& facts, int tile_keys) {
  int32_t count = p.split_size > 0 ? splits_of_size(p) : p.num_splits;
  if (count < 1) count = Choice::splits(p, tiles, device, facts);
  if (count > KeySplits::kMax) count = KeySplits::kMax;
  // The largest padded head dim of a kernel that can run the call.
  int const padded =
      (p.head_dim_v + Choice::kMaxHeadDim - 1) / Choice::kMaxHeadDim * Choice::kMaxHeadDim;
  return {tiles, count, KeySplits::partial_floats(facts.block_m, padded), p.split_size / tile_keys};
}

// Launch parameters of a kernel with splits.
template <class Choice>
struct SplitParams : ForwardParams {
  KeySplits splits;

  // On the host.
  SplitParams(Problem const& p, Workspace const& workspace, DeviceLimits const& device,
              KernelFacts const& facts)
      : ForwardParams(ForwardParams::prepare(p, workspace, device, facts)),
        splits(size_of(p, scheduler.blocks, device, facts), workspace) {}

  static SplitParams prepare(Problem const& p, Workspace const& workspace,
                             DeviceLimits const& device, KernelFacts const& facts) {
    return SplitParams(p, workspace, device, facts);
  }
  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    return size_of(p, tiles_of(p, facts), device, facts).bytes();
  }
  static int32_t num_splits(Problem const& p, DeviceLimits const& device,
                            KernelFacts const& facts) {
    return size_of(p, tiles_of(p, facts), device, facts).count;
  }
  Launch launch(KernelFacts const& facts) const { return splits.launch(scheduler.blocks, facts); }

  // In a kernel: the tile of rows of this block.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE TileCoord tile() const {
    return this->template tile_of<kBlockM, Arch>(splits.unit(Arch::block()));
  }

 private:
  // Dispatch calls this in each call, so it computes no divisors of a TileScheduler. All kernels
  // with splits pack heads, although the facts of a kernel that is not compiled yet do not say so.
  static int64_t tiles_of(Problem const& p, KernelFacts const& facts) {
    return TileScheduler::blocks_of(p, facts.block_m,
                                    TileScheduler::heads_of_tile(p, facts.block_m));
  }
  static KeySplits::Size size_of(Problem const& p, int64_t tiles, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    return size_of_splits<Choice>(p, tiles, device, facts, Choice::kTileKeys);
  }
};

}  // namespace cutlass_attn
