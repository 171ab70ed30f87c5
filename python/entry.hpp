// Python functions of C++ ones: from an array of arguments, which is the fastest that CPython has,
// and for those that are called seldom, from a tuple and a dict.
#pragma once

#include <exception>

#include "errors.hpp"
#include "py.hpp"

namespace cutlass_attn {

using Entry = py::object (*)(PyObject* const* args, Py_ssize_t count, PyObject* names);

template <Entry function>
PyObject* entry(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  try {
    return function(args, count, names).release();
  } catch (py::Error const&) {
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

template <py::object (*function)(PyObject* args, PyObject* keywords)>
PyObject* keyword_entry(PyObject*, PyObject* args, PyObject* keywords) {
  try {
    return function(args, keywords).release();
  } catch (py::Error const&) {
  } catch (std::exception const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// `function` reads its arguments with parse().
template <py::object (*function)(PyObject* args, PyObject* keywords)>
constexpr PyMethodDef keyword_method(char const* name, char const* doc) {
  return {name,
          reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(keyword_entry<function>)),
          METH_VARARGS | METH_KEYWORDS, doc};
}

// Reads arguments by a format of PyArg_ParseTupleAndKeywords.
template <size_t count, class... Outs>
void parse(PyObject* args, PyObject* keywords, char const* format,
           char const* const (&names)[count], Outs*... outs) {
  char* list[count + 1] = {};
  for (size_t i = 0; i < count; ++i) list[i] = const_cast<char*>(names[i]);
  py::check(PyArg_ParseTupleAndKeywords(args, keywords, format, list, outs...) != 0);
}

}  // namespace cutlass_attn
