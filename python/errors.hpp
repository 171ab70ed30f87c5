// Python exceptions from the library's Status, and the parts that messages are made of.
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "core/status.hpp"

namespace cutlass_attn {

[[noreturn]] inline void raise(PyObject* type, std::string const& message) {
  PyErr_SetString(type, message.c_str());
  throw pybind11::error_already_set();
}

// Thrown if an array has no memory, such as a FakeTensor: torch's operators then run the call.
// Where there are no such operators, it becomes a ValueError.
struct NoMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void raise_unless_ok(Status const& status) {
  switch (status.code) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalidArgument:
    case StatusCode::kNoKernel:
      raise(PyExc_ValueError, status.message);
    case StatusCode::kDeviceError:
      raise(PyExc_RuntimeError, status.message);
  }
}

// repr(x)
inline std::string repr(PyObject* x) { return pybind11::repr(pybind11::handle(x)); }

// str(x.name); None if x has no such attribute
inline std::string attribute(PyObject* x, char const* name) {
  return pybind11::str(pybind11::getattr(pybind11::handle(x), name, pybind11::none()));
}

// "numpy.ndarray" of an array, "list" of a list
inline std::string type_name(PyObject* x) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  std::string const module = attribute(type, "__module__");
  return (module == "builtins" ? "" : module + ".") + attribute(type, "__qualname__");
}

// "(2, 4)" of an array with such a shape
inline std::string shape_of(PyObject* x) {
  pybind11::object const shape = pybind11::handle(x).attr("shape");
  return repr(pybind11::reinterpret_steal<pybind11::tuple>(PySequence_Tuple(shape.ptr())).ptr());
}

}  // namespace cutlass_attn
