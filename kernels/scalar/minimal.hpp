// The first rung of the ladder: attention as written in a textbook, one thread a query row.
//
// Grid:  batch * num_heads_q * ceil(seqlen_q / 128) blocks of 128 threads.
// Each thread walks its visible keys once with an online softmax and keeps its row of O in local
// memory. Nothing is shared, nothing is staged: this is what the faster kernels are checked
// against.
#pragma once

#include <cute/config.hpp>

#include "core/dropout.hpp"
#include "core/mask.hpp"
#include "core/params.hpp"
#include "core/scheduler.hpp"
#include "core/softmax.hpp"

namespace cutlass_attn::scalar {

template <class Element>
struct Minimal {
  static constexpr int kThreads = 128;
  static constexpr int kBlockM = kThreads;
  static constexpr bool kPacksHeads = false;
  static constexpr int kMinBlocksPerSm = 1;
  static constexpr int kSmemBytes = 0;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(AttnParams const& p, TileScheduler const& scheduler, char*) {
    TileCoord const tile(scheduler, kBlockM, Arch::block());
    if (Arch::thread() >= tile.rows) return;
    int const q = tile.q_begin + Arch::thread();
    int const batch = tile.batch, head = tile.head_q, head_kv = tile.head_kv;

    auto const row = [](TensorRef const& t, int b, int h, int64_t r) {
      return static_cast<Element*>(t.data) + b * t.batch_stride + h * t.head_stride +
             r * t.row_stride;
    };

    Score const score(p);
    float const log2_scale = score.log2_scale();
    IntervalMask const mask(p);
    Dropout const dropout(p);
    Element const* const q_row = row(p.q, batch, head, q);

    SoftmaxRow softmax;
    float o[kMaxHeadDim];
    for (int d = 0; d < p.head_dim_v; ++d) o[d] = 0.0f;

    int const end = mask.hi(q);
    for (int key = mask.lo(q); key < end; ++key) {
      Element const* const k_row = row(p.k, batch, head_kv, key);
      float s = 0.0f;
      for (int d = 0; d < p.head_dim; ++d) s = fmaf(float(q_row[d]), float(k_row[d]), s);

      float const x = score(s, batch, head, q, key);
      float const rescale = softmax.raise(x, log2_scale);
      float weight = softmax.weight(x, log2_scale);
      softmax.sum += weight;
      if (dropout.is_active()) weight *= dropout.factor(batch, head, q, key);

      Element const* const v_row = row(p.v, batch, head_kv, key);
      for (int d = 0; d < p.head_dim_v; ++d) o[d] = fmaf(weight, float(v_row[d]), o[d] * rescale);
    }

    float const rescale = p.sinks ? softmax.add_logit(p.sinks[head], log2_scale) : 1.0f;
    float const inverse = rescale * softmax.inverse_sum();
    Element* const o_row = row(p.o, batch, head, q);
    for (int d = 0; d < p.head_dim_v; ++d) o_row[d] = Element(o[d] * inverse);
    if (p.softmax_lse) p.softmax_lse[tile.lse_of(p, Arch::thread())] = softmax.lse(log2_scale);
  }
};

}  // namespace cutlass_attn::scalar
