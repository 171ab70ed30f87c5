// The largest logit of each query, as an output. It changes no logit. It is a term because keeping
// it costs a register per row and an instruction per logit, which kernels without the term do not
// pay: their row max lags (tile/softmax_rows.hpp).
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct MaxLogit {
  // Writes the largest logit of a query, in units of log2 and without the sink.
  //   seq: rows of the batch entry (core/sequences.hpp)
  template <class SeqInfo>
  CA_HOST_DEVICE static void store(Problem const& p, SeqInfo const& seq, int head, int query,
                                   float largest) {
    p.max_logits[seq.lse(p, head, query)] = largest * kLn2;
  }
};

}  // namespace cutlass_attn
