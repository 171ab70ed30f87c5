// Run-time compilation: cutlass_attn.jit provides the kernels that the build left out.
#pragma once

#include <string>
#include <utility>

#include "cutlass_attn.hpp"
#include "entry.hpp"
#include "errors.hpp"
#include "py.hpp"

namespace cutlass_attn {

// Exceptions of Python, KeyboardInterrupt among them, pass through the library to the caller.
inline Status compile_in_python(std::string const& key, int device_index) {
  py::acquire_gil locked;
  py::import("cutlass_attn.jit").attr("provide")(key, device_index);
  return {};
}

// An empty reason sets the compiler again.
inline py::object set_compiler_call(PyObject* args, PyObject* keywords) {
  char const* why_not;
  parse(args, keywords, "s", {"why_not"}, &why_not);
  set_compiler(*why_not ? nullptr : &compile_in_python, why_not);
  return py::none();
}

inline py::object refuse_kernel_call(PyObject* args, PyObject* keywords) {
  char const *key, *why_not;
  parse(args, keywords, "ss", {"key", "why_not"}, &key, &why_not);
  raise_unless_ok(refuse_kernel(key, why_not));
  return py::none();
}

inline py::object load_kernel_call(PyObject* args, PyObject* keywords) {
  char const *key, *cubin;
  int device_index;
  Py_ssize_t size;
  parse(args, keywords, "siy#", {"key", "device_index", "cubin"}, &key, &device_index, &cubin,
        &size);
  raise_unless_ok(load_kernel(key, device_index, cubin));
  return py::none();
}

inline void define_compiler(py::handle m) {
  set_compiler(&compile_in_python);
  static PyMethodDef methods[] = {
      keyword_method<set_compiler_call>("set_compiler", "Sets or removes the run-time compiler."),
      keyword_method<refuse_kernel_call>("refuse_kernel", "Gives the reason why one cannot run."),
      keyword_method<load_kernel_call>("load_kernel", "Loads a kernel's machine code."),
      {},
  };
  py::check(PyModule_AddFunctions(m.ptr(), methods) == 0);
}

}  // namespace cutlass_attn
