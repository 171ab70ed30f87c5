// Python exceptions: from the library's Status, and the words that messages are made of.
#pragma once

#include <stdexcept>
#include <string>

#include "core/status.hpp"
#include "py.hpp"

namespace cutlass_attn {

[[noreturn]] inline void raise(PyObject* type, std::string const& message) {
  PyErr_SetString(type, message.c_str());
  throw py::Error();
}

// Thrown if an array has no memory, such as a FakeTensor: torch's operators then run the call. In
// contexts without such operators it is a ValueError.
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

using py::checked;
using py::repr;

// str(x.name), None where x has no such attribute
inline std::string attribute(PyObject* x, char const* name) {
  PyObject* const found = PyObject_GetAttrString(x, name);
  if (found != nullptr) return py::str(checked(found));
  PyErr_Clear();
  return "None";
}

// "numpy.ndarray" of an array
inline std::string type_name(PyObject* x) {
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  return attribute(type, "__module__") + "." + attribute(type, "__qualname__");
}

// "(2, 4)" of an array with such a shape
inline std::string shape_of(PyObject* x) {
  py::object const shape = py::handle(x).attr("shape");
  return repr(py::checked(PySequence_Tuple(shape.ptr())));
}

}  // namespace cutlass_attn
