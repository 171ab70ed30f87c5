// Epilogue of a query row, after its last key; shared by all kernels.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"
#include "core/softmax.hpp"

namespace cutlass_attn {

// Adds the sink of query head `head`, writes the LSE, and returns the factor of the row of O.
//   seq:         rows of the batch entry (core/sequences.hpp)
//   row:         state after the last key; log2_scale is that of its units
//   writes_lse:  true in one of the threads that share the row; false for rows beyond the last
template <class SeqInfo>
CA_HOST_DEVICE float finish_row(Problem const& p, SeqInfo const& seq, int head, int query,
                                SoftmaxRow& row, float log2_scale, bool writes_lse) {
  float const rescale = p.logits.sinks ? row.add_logit(p.logits.sinks[head], log2_scale) : 1.0f;
  if (writes_lse && p.softmax_lse) p.softmax_lse[seq.lse(p, head, query)] = row.lse(log2_scale);
  return rescale * row.inverse_sum();
}

}  // namespace cutlass_attn
