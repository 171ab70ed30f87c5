// A valid call for check(), to be modified.
#pragma once

#include <string>
#include <vector>

#include "check.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn {

// A valid call with its own memory.
struct Call {
  static constexpr int kBatch = 2, kHeads = 4, kHeadsKv = 2, kSeqlenQ = 5, kSeqlenK = 7, kDim = 8;
  std::vector<float> q, k, v, o, lse;
  Problem p;

  Call()
      : q(kBatch * kHeads * kSeqlenQ * kDim),
        k(kBatch * kHeadsKv * kSeqlenK * kDim),
        v(k.size()),
        o(q.size()),
        lse(kBatch * kHeads * kSeqlenQ) {
    p.q = {q.data(), kHeads * kSeqlenQ * kDim, kSeqlenQ * kDim, kDim};
    p.k = {k.data(), kHeadsKv * kSeqlenK * kDim, kSeqlenK * kDim, kDim};
    p.v = {v.data(), kHeadsKv * kSeqlenK * kDim, kSeqlenK * kDim, kDim};
    p.o = {o.data(), kHeads * kSeqlenQ * kDim, kSeqlenQ * kDim, kDim};
    p.softmax_lse = lse.data();
    p.set_dtype(DType::kFloat32);
    p.batch = kBatch;
    p.num_heads_q = kHeads;
    p.num_heads_kv = kHeadsKv;
    p.seq_q.seqlen = kSeqlenQ;
    p.seq_k.seqlen = kSeqlenK;
    p.head_dim = p.head_dim_v = kDim;
  }
};

// The error message after a change to a valid call; "" if the call is still valid.
template <class Change>
std::string message(Change const& change, StatusCode code = StatusCode::kInvalidArgument) {
  Call call;
  change(call.p);
  Status const status = cutlass_attn::check(call.p);
  if (!status.ok()) CHECK(status.code == code);
  return status.message;
}

}  // namespace cutlass_attn
