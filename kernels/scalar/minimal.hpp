// The first rung of the ladder: textbook attention, one thread per query row.
//
// Grid:  batch * num_heads_q * ceil(seqlen_q / 128) blocks of 128 threads.
// Each thread loops once over its visible keys with an online softmax, and keeps its row of O in
// local memory. The kernel uses no shared memory. It is the reference for faster kernels, and takes
// every kind of problem: packed sequences, pages, lists of keys, scales.
#pragma once

#include <cute/config.hpp>

#include "core/dropout.hpp"
#include "core/epilogue.hpp"
#include "core/forward_params.hpp"
#include "core/mask.hpp"
#include "core/softmax.hpp"
#include "core/terms/max_logit.hpp"

namespace cutlass_attn::scalar {

template <class Element>
struct Minimal : KernelDefaults {
  using Params = ForwardParams;
  static constexpr int kThreads = 128;
  static constexpr int kBlockM = kThreads;
  static constexpr int kMinBlocksPerSm = 1;
  static constexpr int kSmemBytes = 0;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char*) {
    Problem const& p = params.problem;
    BasicTileCoord<VarlenSeqInfo> const tile(p, params.scheduler, kBlockM, Arch::block());
    if (Arch::thread() >= tile.rows) return;
    int const q = tile.q_begin + Arch::thread();
    int const batch = tile.seq.batch, head = tile.head_q, head_kv = tile.head_kv;
    SeqLens const seqlens = tile.seq.lens(p);
    StoredKv<Element> const k(p, tile.seq, p.k, head_kv), v(p, tile.seq, p.v, head_kv);

    Score const score(p, seqlens);
    float const log2_scale = score.log2_scale();
    IntervalMask const mask = params.template mask<Score::kHasChunks>(seqlens);
    DropoutMask const dropout(p);
    Element const* const q_row = tile.template row_of<Element>(p.q, Arch::thread());

    float const qk_scale = scale_of(p.q, head) * scale_of(p.k, head_kv);
    float const vo_scale = scale_of(p.v, head_kv) / scale_of(p.o, head);

    SoftmaxRow softmax;
    float o[kMaxHeadDim];
    for (int d = 0; d < p.head_dim_v; ++d) o[d] = 0.0f;

    KeyList const list(p, batch, q);
    int const end = mask.hi(q);
    for (int key = mask.lo(q); key < end; ++key) {
      int const row = list(key);
      if (row < 0) continue;
      float s = 0.0f;
      k.with_row(row, [&](auto const& k_row) {
        for (int d = 0; d < p.head_dim; ++d) s = fmaf(float(q_row[d]), float(k_row[d]), s);
      });

      float const x = score(s * qk_scale, batch, head, q, key);
      if (x == -kInf) continue;  // masked; 0 times NaN in V would be NaN
      float const rescale = softmax.update_max(x, log2_scale);
      float weight = softmax.weight(x, log2_scale);
      softmax.sum += weight;
      if (dropout.is_active()) weight *= dropout.factor(batch, head, q, key);

      v.with_row(row, [&](auto const& v_row) {
        for (int d = 0; d < p.head_dim_v; ++d) o[d] = fmaf(weight, float(v_row[d]), o[d] * rescale);
      });
    }

    if (p.max_logits) MaxLogit::store(p, tile.seq, head, q, softmax.max * log2_scale);
    float const factor = vo_scale * finish_row(p, tile.seq, head, q, softmax, log2_scale, true);
    Element* const o_row = tile.template row_of<Element>(p.o, Arch::thread());
    for (int d = 0; d < p.head_dim_v; ++d) o_row[d] = Element(o[d] * factor);
  }
};

}  // namespace cutlass_attn::scalar
