// Launch parameters of the forward kernel with splits of the keys.
#pragma once

#include "core/key_splits.hpp"

namespace cutlass_attn {

// Chooses the number of splits with the least modelled latency. Unit: time per key of a block that
// is alone on its SM. A split takes the time of its share of the keys. The last block waits for the
// other results, then reads one result per split (docs/notes/decode.md). All splits of all tiles
// run at once, each on an SM.
struct DenseSplits {
  static constexpr int64_t kMergeKeys = 120;  // for results to reach the last block
  static constexpr int64_t kPartKeys = 20;    // for it to read the result of one split
  static constexpr int kMaxHeadDim = 128, kTileKeys = 64;

  static int32_t splits(Problem const& p, int64_t tiles, DeviceLimits const& device,
                        KernelFacts const& facts) {
    if (tiles < 1) return 1;
    int64_t most = device.num_sms / tiles;
    if (most > KeySplits::kMax) most = KeySplits::kMax;
    int64_t const keys =
        max_keys(p, p.seq_q.seqlen < facts.block_m ? p.seq_q.seqlen : facts.block_m);
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
