// K and V that were rounded to 8 bits once, for several calls, which pass them as `quantize`.
#pragma once

#include <pybind11/pybind11.h>

#include "cutlass_attn.hpp"

namespace cutlass_attn {

struct Prequantized {
  pybind11::object k, v;
  // Of k and v: number of writes that torch has counted; None: not counted.
  pybind11::object versions[2];
  Problem problem;          // of a call with these k and v; its q is a placeholder
  pybind11::object memory;  // None: the kernel keeps nothing
  Workspace workspace;      // the bytes of `memory`

  // Raises ValueError unless the call's k and v are these tensors, unchanged. Without `has_memory`
  // the problem has no addresses.
  void require_same(Problem const& call, bool has_memory) const;
};

// The object as a Prequantized, or null if it is something else.
Prequantized const* prequantized_of(PyObject* quantize);

// Defines in _C: PrequantizedKV, and prequantize(k, k, v, options), which makes one, with
// `quantize`, `layout` and `kernel` of attention().
void define_prequantized(pybind11::module_& m);

}  // namespace cutlass_attn
