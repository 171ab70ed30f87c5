// Run-time compilation: cutlass_attn.jit provides the kernels that the build left out.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "cutlass_attn.hpp"
#include "errors.hpp"

namespace cutlass_attn {

// Python exceptions, including KeyboardInterrupt, pass through the library to the caller.
inline Status compile_in_python(std::string const& key, int device_index) {
  pybind11::gil_scoped_acquire locked;
  pybind11::module_::import("cutlass_attn.jit").attr("provide")(key, device_index);
  return {};
}

inline void define_compiler(pybind11::module_& m) {
  set_compiler(&compile_in_python);
  // An empty reason sets the compiler again.
  m.def("set_compiler", [](std::string const& why_not) {
    set_compiler(why_not.empty() ? &compile_in_python : nullptr, why_not);
  });
  m.def("refuse_kernel", [](std::string const& key, std::string why_not) {
    raise_unless_ok(refuse_kernel(key, std::move(why_not)));
  });
  m.def("load_kernel", [](std::string const& key, int device_index, pybind11::bytes const& cubin) {
    std::string const code = cubin;
    raise_unless_ok(load_kernel(key, device_index, code.data()));
  });
}

}  // namespace cutlass_attn
