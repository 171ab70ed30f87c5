// The library's Status as a Python exception.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/status.hpp"

namespace cutlass_attn {

[[noreturn]] inline void raise(PyObject* type, std::string const& message) {
  PyErr_SetString(type, message.c_str());
  throw pybind11::error_already_set();
}

inline void raise_unless_ok(Status const& status) {
  switch (status.code) {
    case StatusCode::kOk:
      return;
    case StatusCode::kInvalidArgument:
    case StatusCode::kNoKernel:
      raise(PyExc_ValueError, status.message);
    case StatusCode::kNotImplemented:
      raise(PyExc_NotImplementedError, status.message);
    case StatusCode::kDeviceError:
      raise(PyExc_RuntimeError, status.message);
  }
}

}  // namespace cutlass_attn
