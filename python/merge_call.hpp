// merge_states() by its kernel.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_attn {

// Defines merge in _C: of o_a, lse_a, o_b and lse_b, whose shapes and dtypes agree, the pair that
// they merge to; None where the kernel cannot say it: torch has to see each step of the call, or
// rows are not contiguous, or of float64.
void define_merge_call(pybind11::module_& m);

}  // namespace cutlass_attn
