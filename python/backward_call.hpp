// Calls of a backward pass: what it is given and writes, on top of the options that call.hpp reads.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_attn {

// Defines backward, backward_varlen and explain_backward in _C. Each takes (q, k, v, options,
// **more) as forward() does, with these keywords beside those of attention() or attention_varlen():
//
//   grad_out, out, softmax_lse       of the forward call: like its results
//   grad_softmax_lse                 float32, or None: the LSE has none
//   grad_q, grad_k, grad_v           to write, like q, k and v; None where not wanted
//   grad_bias                        to write, float32, with 1 to 4 dimensions that broadcast to
//                                    (batch, num_heads_q, seqlen_q, seqlen_k): its entries are sums
//                                    over what they are broadcast over
//   grad_sinks                       to write, float32, (num_heads_q,)
//                                    (of float64 operands these four are float64)
//   deterministic                    the same bits every time
//
// backward and backward_varlen return None. Rows of packed operands that no entry has, and those
// beyond seqused_k, are not written; those of padding of backward's are zeros.
//
// With `wanted`, up to five bools of q, k, v, bias and sinks, they make the gradients, and return a
// tuple as long as that: None where not wanted, of the dtype of the input where it is. grad_out may
// then be None, and have any strides. Of torch's tensors alone. If torch has to see the pass they
// return None, unless the keyword `dispatched` is there.
//
// explain_backward, with `device`, returns verdicts as explain() does. What it is not given it
// takes for contiguous, grad_bias and grad_sinks for not wanted.
void define_backward_calls(pybind11::module_& m);

}  // namespace cutlass_attn
