// Calls of attention_varlen(), attention_decode() and append_kv(): arguments for the position of
// rows, in addition to the options that call.hpp reads.
#pragma once

#include <pybind11/pybind11.h>

#include "call.hpp"

namespace cutlass_attn {

// Defines varlen, decode, decode_append and append in _C. Each takes (first, k, v, options,
// **internal) as forward() does:
//
//   varlen          q, k, v. Returns the result, or a tuple of result, LSE and largest logits
//   decode          q, k_cache, v_cache, and for this package `mask`, and `return_max_logit`, which
//                   adds the largest logit of each query. Returns as varlen
//   decode_append   arguments of decode. Runs only the part before attention; returns the rotated
//                   queries, or None, and the new lengths
//   append          k, k_cache, v_cache, with v as `v_new`. Returns None
//   explain_varlen, explain_decode   the arguments of the calls, and `device`. Return the result of
//                   explain() of call.hpp
void define_serving_calls(pybind11::module_& m);

// Reads the arrays of attention_varlen() and of its backward pass, except `out`, as
// Call::read_arrays() does.
void read_varlen(Call& call, Arguments const& given, bool memory);

}  // namespace cutlass_attn
