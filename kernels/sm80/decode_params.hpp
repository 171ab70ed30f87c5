// What the decode kernel is launched with.
#pragma once

#include "sm80/key_splits.hpp"

namespace cutlass_attn {

// As few splits as fill the GPU's SMs, of which each needs one block for as many bytes in flight
// as memory can use, nearly as well as any number would.
struct DecodeSplits {
  // A split has at least so many keys: less is not worth another block's prologue and its part of
  // the merge.
  static constexpr int kMinKeys = 256;
  static constexpr int kMaxHeadDim = 256;

  static int32_t splits(Problem const& p, int64_t tiles, DeviceLimits const& device, int) {
    if (tiles < 1 || device.num_sms < 1) return 1;
    int64_t const slots = device.num_sms;
    int64_t most = (most_keys(p, p.seq_q.seqlen) + kMinKeys - 1) / kMinKeys;
    if (most > KeySplits::kMax) most = KeySplits::kMax;
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

struct DecodeParams : SplitParams<DecodeSplits> {
  FastDivisor by_page;  // keys of a page; by 1 without pages

  // On the host.
  static DecodeParams prepare(Problem const& p, Workspace const& workspace,
                              DeviceLimits const& device, KernelFacts const& facts) {
    return {{p, workspace, device, facts}, FastDivisor(p.kv.page_size > 0 ? p.kv.page_size : 1)};
  }
};

}  // namespace cutlass_attn
