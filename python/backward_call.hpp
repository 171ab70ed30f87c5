// Calls of a backward pass: inputs and outputs in addition to the options that call.hpp reads.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_attn {

// Defines backward, backward_varlen and explain_backward in _C. Each takes (q, k, v, options,
// **more) like forward(), with these keywords and those of attention() or attention_varlen():
//
//   grad_out, out, softmax_lse       of the forward call: like its results
//   grad_softmax_lse                 float32, or None if the LSE has no gradient
//   grad_q, grad_k, grad_v           written; shaped like q, k and v; None if not wanted
//   grad_bias                        written; float32; 1 to 4 dimensions that broadcast to
//                                    (batch, num_heads_q, seqlen_q, seqlen_k); each entry is the
//                                    sum over the logits that it is broadcast to
//   grad_sinks                       written; float32, (num_heads_q,)
//                                    (float64 for float64 operands, as are the LSE, its gradient
//                                    and grad_bias)
//   deterministic                    equal bits in every run
//
// backward and backward_varlen return None. Rows of packed operands that belong to no sequence, and
// rows beyond seqused_k, are not written; in backward, rows of padding are set to zero.
//
// With `wanted`, up to five bools for q, k, v, bias and sinks, they allocate the gradients and
// return a tuple of that length: None where not wanted, else an array with the dtype of the input.
// grad_out may then be None or have any strides. Only for torch tensors. If torch must see the
// pass, they return None, unless the keyword `dispatched` is given.
//
// explain_backward, with `device`, returns verdicts like explain(). Missing arguments are taken as
// contiguous, and missing grad_bias and grad_sinks as not wanted.
void define_backward_calls(pybind11::module_& m);

}  // namespace cutlass_attn
