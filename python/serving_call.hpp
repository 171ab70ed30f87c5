// Calls of attention_varlen(), attention_decode() and append_kv(): the arguments that say where
// rows are, on top of the options that call.hpp reads.
#pragma once

#include <pybind11/pybind11.h>

#include "call.hpp"

namespace cutlass_attn {

// Defines varlen, decode, decode_append and append in _C. Each takes (first, k, v, options,
// **internal) as forward() does:
//
//   varlen         q, k, v: the result, or a pair of it and LSE
//   decode         q, k_cache, v_cache, and `mask` for this package: the same
//   decode_append  the same arguments: only what decode does before attention; the rotated queries,
//                  or None, and the lengths afterwards
//   append         k, k_cache, v_cache, with v as `v_new`: None
//   explain_varlen, explain_decode   as the calls, with `device`: what explain() of call.hpp
//   returns
void define_serving_calls(pybind11::module_& m);

// Reads what attention_varlen() and its backward pass are given of arrays, but for `out`, as
// Call::read_arrays() does.
void read_varlen(Call& call, Arguments const& given, bool memory);

}  // namespace cutlass_attn
