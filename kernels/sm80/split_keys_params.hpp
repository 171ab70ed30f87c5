// What the forward kernel is launched with where blocks share the keys of a tile of rows.
#pragma once

#include "sm80/key_splits.hpp"

namespace cutlass_attn {

// The number of splits that a block is done with soonest, by a model whose unit is the time that a
// block alone on its SM takes for a key. A split has its share of the keys; the last one waits for
// the others' results, and then reads as many of them as there are splits (docs/notes/decode.md).
// All splits of all tiles run at once, each on an SM.
struct DenseSplits {
  static constexpr int64_t kMergeKeys = 120;  // for results to reach the last block
  static constexpr int64_t kPartKeys = 20;    // for it to read those of a split
  static constexpr int kMaxHeadDim = 128;

  static int32_t splits(Problem const& p, int64_t tiles, DeviceLimits const& device, int block_m) {
    if (tiles < 1) return 1;
    int64_t most = device.num_sms / tiles;
    if (most > KeySplits::kMax) most = KeySplits::kMax;
    int64_t const keys = most_keys(p, p.seq_q.seqlen < block_m ? p.seq_q.seqlen : block_m);
    int64_t best = 1, least = keys;
    for (int64_t n = 2; n <= most; ++n) {
      int64_t const cost = keys / n + kMergeKeys + n * kPartKeys;
      if (cost < least) best = n, least = cost;
    }
    return int32_t(best);
  }
};

using SplitKeysParams = SplitParams<DenseSplits>;

}  // namespace cutlass_attn
