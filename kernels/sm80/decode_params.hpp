// Launch parameters of the decode kernel.
#pragma once

#include "core/key_splits.hpp"

namespace cutlass_attn {

// Chooses the fewest splits that fill the GPU's SMs to within 5 % of the best number. One block per
// SM has enough bytes in flight to saturate memory. With 1x32768 keys of 8 heads, 16 splits leave 4
// of an H200's 132 SMs without a block and take 45.5 us; 33 splits, two blocks per SM, take 46.8.
// With small pages a large SM gets two blocks, because scattered rows have a longer latency:
// 16x8192 keys in pages of 1, 8, 16 and 32 then take 140, 143, 139 and 138 us, instead of 156, 148,
// 141 and 137.
struct DecodeSplits {
  // Fewest keys of a split. With fewer, another block's prologue and its part of the merge cost
  // more than they save. 1x1024 keys took 12.5 us with 256, 11.2 with 128, 11.6 with 64.
  static constexpr int kMinKeys = 128;
  static constexpr int kSmallPage = 16;
  static constexpr int kMaxHeadDim = 256, kTileKeys = 16;

  static int32_t splits(Problem const& p, int64_t tiles, DeviceLimits const& device,
                        KernelFacts const&) {
    if (tiles < 1 || device.num_sms < 1) return 1;
    // At head dim 128 a block has 98 KB of shared memory. With an 8-bit cache, two blocks would
    // have too many registers.
    bool const has_room = device.smem_per_sm >= 2 * (98 << 10) && p.k.dtype == p.q.dtype;
    bool const has_small_pages = p.kv.block_table && p.kv.page_size <= kSmallPage;
    int64_t const blocks = int64_t(device.num_sms) * (has_small_pages && has_room ? 2 : 1);
    int64_t most = max_keys(p, p.seq_q.seqlen) / kMinKeys;
    if (most > KeySplits::kMax) most = KeySplits::kMax;
    Waves best(tiles, blocks);
    for (Waves each = best; each.splits < most && best.spare != 0;) {
      each.add();
      if (!best.is_fuller(each, 100)) best = each;
    }
    Waves chosen(tiles, blocks);
    while (!chosen.is_fuller(best, 95)) chosen.add();
    return int32_t(chosen.splits);
  }

 private:
  // Waves of a number of splits of all tiles; the last wave may be partial. Each call compares many
  // numbers of splits, so they are computed without a division.
  struct Waves {
    int64_t blocks, whole, rest;  // full waves of one split, and its tiles beyond them
    int64_t splits = 1, waves, spare;

    Waves(int64_t tiles, int64_t blocks)
        : blocks(blocks),
          whole(tiles / blocks),
          rest(tiles % blocks),
          waves(whole + (rest > 0)),
          spare(waves * blocks - tiles) {}
    void add() {
      ++splits;
      waves += whole;
      spare -= rest;
      if (spare < 0) ++waves, spare += blocks;
    }
    // Whether splits per wave are at least `percent` % of the other's.
    bool is_fuller(Waves const& other, int percent) const {
      return splits * other.waves * 100 >= other.splits * waves * percent;
    }
  };
};

struct DecodeParams : SplitParams<DecodeSplits> {
  // Most rows of a KV head. The kernel reads K and V once for every 16 rows, the forward kernels
  // once for 64.
  static constexpr int kMaxRows = 64;
  FastDivisor by_page;  // divides by the page size; by 1 without pages

  // On the host.
  static DecodeParams prepare(Problem const& p, Workspace const& workspace,
                              DeviceLimits const& device, KernelFacts const& facts) {
    return {{p, workspace, device, facts}, FastDivisor(p.kv.page_size > 0 ? p.kv.page_size : 1)};
  }
};

}  // namespace cutlass_attn
