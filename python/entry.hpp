// Defines Python functions without pybind11, whose argument dispatch takes as long as all other
// work of a call before its launch.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "errors.hpp"

namespace cutlass_attn {

using Entry = pybind11::object (*)(PyObject* const* args, Py_ssize_t count, PyObject* names);

template <Entry function>
PyObject* entry(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  try {
    return function(args, count, names).release().ptr();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (pybind11::cast_error const& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (NoMemory const& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (std::exception const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <Entry function>
constexpr PyMethodDef method(char const* name, char const* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry<function>)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

}  // namespace cutlass_attn
