// Launch parameters of the kernel with an error limit (sm80/quantized/limited.hpp): those of the
// two kernels that it combines, for equal tiles of queries. The workspace is that of products in 8
// bits (quantized/params.hpp), and
//
//   errors   (batch, num_heads_q) fp32     predictions of core/predict.hpp
#pragma once

#include "core/predict.hpp"
#include "quantized/params.hpp"

namespace cutlass_attn::sm80 {

template <class Narrow_>
struct LimitedParams {
  using Narrow = Narrow_;
  static constexpr int kPrePostThreads = Narrow::kPrePostThreads;
  // Shared memory of a prediction: the shift of a head, computed as for rounding its tiles, and
  // scratch of the lanes.
  using Scratch = quantize::PredictedScratch<kPrePostThreads / 32>;
  static constexpr int kShiftBytes = Narrow::kPrePostSmemBytes;
  static constexpr int kPrePostSmemBytes = kShiftBytes + int(sizeof(Scratch));

  Narrow narrow;       // in 8 bits
  ForwardParams wide;  // in 16 bits
  float* errors;
  int32_t heads;  // query heads of all batch entries; each has a prediction
  int32_t heads_per_kv;

  static LimitedParams prepare(Problem const& p, Workspace const& workspace,
                               DeviceLimits const& device, KernelFacts const& facts) {
    LimitedParams params{Narrow::prepare(p, workspace, device, facts),
                         ForwardParams::prepare(p, workspace, device, facts), nullptr,
                         p.batch * p.num_heads_q,
                         p.num_heads_kv > 0 ? p.num_heads_q / p.num_heads_kv : 1};
    int64_t const before = Narrow::workspace_bytes(p, device, facts);
    params.errors = reinterpret_cast<float*>(static_cast<char*>(workspace.data) + before);
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    return Narrow::workspace_bytes(p, device, facts) + int64_t(p.batch) * p.num_heads_q * 4;
  }

  Launch launch(KernelFacts const& facts) const { return wide.launch(facts); }
  Launch launch_before(KernelFacts const& facts) const {
    Launch launch = narrow.launch_before(facts);
    launch.blocks += heads;
    launch.smem_bytes = kPrePostSmemBytes;
    return launch;
  }
  Launch launch_after(KernelFacts const&) const { return {}; }

  // In a kernel: whether the predictions of all query heads that share KV head `head` are within
  // the limit. head: index over all batch entries.
  CA_HOST_DEVICE bool is_within(int32_t head) const {
    float const* const of_group = errors + int64_t(head) * heads_per_kv;
    bool result = true;
    CA_UNROLL_8
    for (int i = 0; i < heads_per_kv; ++i) {
      result = quantize::is_within(of_group[i], wide.problem.max_error) && result;
    }
    return result;
  }
};

}  // namespace cutlass_attn::sm80
