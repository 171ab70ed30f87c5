// The GPU kernel of merge_states().
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_attn {

// Defines merge in _C: merges o_a, lse_a, o_b and lse_b, whose shapes and dtypes must agree, into a
// pair. Returns None if the kernel cannot run the call: torch must see each step, or rows are not
// contiguous or are float64.
void define_merge_call(pybind11::module_& m);

}  // namespace cutlass_attn
