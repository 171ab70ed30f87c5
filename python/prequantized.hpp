// K and V that were rounded to 8 bits once, for several calls, which pass them as `quantize`.
#pragma once

#include <pybind11/pybind11.h>

#include "cutlass_attn.hpp"

namespace cutlass_attn {

struct Prequantized {
  pybind11::object k, v;
  pybind11::object
      versions[2];          // of k and v: how often torch has counted a write; None: nobody has
  Problem problem;          // of a call with these k and v; its q stands in
  pybind11::object memory;  // None: of kernels that keep nothing
  Workspace workspace;      // its bytes

  // Raises ValueError unless the call's k and v are these tensors, and unchanged. Without
  // `has_memory` the problem has no addresses.
  void require_same(Problem const& call, bool has_memory) const;
};

// The object as a Prequantized, or null if it is something else.
Prequantized const* prequantized_of(PyObject* quantize);

// Defines PrequantizedKV in _C, and prequantize(k, k, v, options), which makes it: with `quantize`,
// `layout` and `kernel` of attention().
void define_prequantized(pybind11::module_& m);

}  // namespace cutlass_attn
