// What is left to do for a query row once all its keys are in the softmax state: the same for every
// kernel.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"
#include "core/softmax.hpp"

namespace cutlass_attn {

// Joins the sink of query head `head`, writes LSE and returns what the row of O is multiplied by.
//   seq:         of the batch entry (core/sequences.hpp)
//   row:         all keys are in it; log2_scale is of its units
//   writes_lse:  false for all but one of the threads that share the row, and for a row beyond the
//                last
template <class SeqInfo>
CA_HOST_DEVICE float finish_row(Problem const& p, SeqInfo const& seq, int head, int query,
                                SoftmaxRow& row, float log2_scale, bool writes_lse) {
  float const rescale = p.logits.sinks ? row.add_logit(p.logits.sinks[head], log2_scale) : 1.0f;
  if (writes_lse && p.softmax_lse) p.softmax_lse[seq.lse(p, head, query)] = row.lse(log2_scale);
  return rescale * row.inverse_sum();
}

}  // namespace cutlass_attn
