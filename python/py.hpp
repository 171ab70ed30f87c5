// Python objects in C++, with CPython's limited API of 3.10 alone: one binary for all later
// versions. Each function that fails throws py::Error, with the Python exception set.
#pragma once

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace cutlass_attn::py {

// A Python exception is set. Whoever catches this and goes on has to call PyErr_Clear().
struct Error {};

class object;

// A borrowed reference.
class handle {
 public:
  handle() = default;
  handle(PyObject* x) : ptr_(x) {}

  PyObject* ptr() const { return ptr_; }
  explicit operator bool() const { return ptr_ != nullptr; }
  bool is(handle other) const { return ptr_ == other.ptr_; }
  bool is_none() const { return ptr_ == Py_None; }
  bool equal(handle other) const;

  object attr(char const* name) const;
  template <class... Args>
  object operator()(Args const&... args) const;
  // As bool, an integer or a double.
  template <class T>
  T cast() const;

 protected:
  PyObject* ptr_ = nullptr;
};

// An owned reference, or none.
class object : public handle {
 public:
  object() = default;
  object(object const& other) : handle(other.ptr_) { Py_XINCREF(ptr_); }
  object(object&& other) noexcept : handle(other.release()) {}
  object& operator=(object other) noexcept {
    std::swap(ptr_, other.ptr_);
    return *this;
  }
  ~object() { Py_XDECREF(ptr_); }

  static object steal(PyObject* owned) {
    object result;
    result.ptr_ = owned;
    return result;
  }
  PyObject* release() { return std::exchange(ptr_, nullptr); }
};

inline object borrow(PyObject* x) {
  Py_XINCREF(x);
  return object::steal(x);
}
inline object none() { return borrow(Py_None); }

// Takes a new reference; throws if it is null.
inline object checked(PyObject* owned) {
  if (owned == nullptr) throw Error();
  return object::steal(owned);
}
inline void check(bool is_ok) {
  if (!is_ok) throw Error();
}

inline bool is_true(handle x) {
  int const value = PyObject_IsTrue(x.ptr());
  check(value >= 0);
  return value != 0;
}

// --- From C++ ------------------------------------------------------------------------------------

inline object to_python(handle x) { return x ? borrow(x.ptr()) : none(); }
inline object to_python(char const* text) { return checked(PyUnicode_FromString(text)); }
inline object to_python(std::string const& text) {
  return checked(PyUnicode_FromStringAndSize(text.data(), Py_ssize_t(text.size())));
}
template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
object to_python(T x) {
  if constexpr (std::is_same_v<T, bool>) {
    return checked(PyBool_FromLong(x));
  } else if constexpr (std::is_integral_v<T>) {
    return checked(PyLong_FromLongLong(static_cast<long long>(x)));
  } else {
    return checked(PyFloat_FromDouble(x));
  }
}

template <class... Args>
object make_tuple(Args const&... args) {
  object tuple = checked(PyTuple_New(sizeof...(args)));
  [[maybe_unused]] Py_ssize_t i = 0;
  (check(PyTuple_SetItem(tuple.ptr(), i++, to_python(args).release()) == 0), ...);
  return tuple;
}

template <class T>
object to_list(std::vector<T> const& items) {
  object list = checked(PyList_New(0));
  for (T const& x : items) check(PyList_Append(list.ptr(), to_python(x).ptr()) == 0);
  return list;
}

// dict("key", value, ...)
inline void fill(handle) {}
template <class Value, class... More>
void fill(handle dict, char const* key, Value const& value, More const&... more) {
  check(PyDict_SetItemString(dict.ptr(), key, to_python(value).ptr()) == 0);
  fill(dict, more...);
}
template <class... Args>
object dict(Args const&... items) {
  object made = checked(PyDict_New());
  fill(made, items...);
  return made;
}

// --- To C++ --------------------------------------------------------------------------------------

template <class T>
T handle::cast() const {
  if constexpr (std::is_same_v<T, bool>) {
    return is_true(*this);
  } else if constexpr (std::is_floating_point_v<T>) {
    double const value = PyFloat_AsDouble(ptr_);
    check(value != -1.0 || !PyErr_Occurred());
    return T(value);
  } else if constexpr (std::is_unsigned_v<T>) {
    unsigned long long const value = PyLong_AsUnsignedLongLong(ptr_);
    check(value != static_cast<unsigned long long>(-1) || !PyErr_Occurred());
    return T(value);
  } else {
    long long const value = PyLong_AsLongLong(ptr_);
    check(value != -1 || !PyErr_Occurred());
    return T(value);
  }
}

// A str; one that UTF-8 does not have with escapes.
inline std::string utf8(handle text) {
  object const bytes = checked(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  char* data = nullptr;
  Py_ssize_t size = 0;
  check(PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) == 0);
  return {data, size_t(size)};
}
inline std::string str(handle x) { return utf8(checked(PyObject_Str(x.ptr()))); }
inline std::string repr(handle x) { return utf8(checked(PyObject_Repr(x.ptr()))); }

// --- Attributes and calls ------------------------------------------------------------------------

inline bool handle::equal(handle other) const {
  int const value = PyObject_RichCompareBool(ptr_, other.ptr_, Py_EQ);
  check(value >= 0);
  return value != 0;
}
inline object handle::attr(char const* name) const {
  return checked(PyObject_GetAttrString(ptr_, name));
}
template <class... Args>
object handle::operator()(Args const&... args) const {
  return checked(PyObject_Call(ptr_, make_tuple(args...).ptr(), nullptr));
}
inline object import(char const* module) { return checked(PyImport_ImportModule(module)); }

// Of what a call does each time: no tuple is made.
inline object call(handle function) { return checked(PyObject_CallNoArgs(function.ptr())); }
inline object call(handle function, handle x) {
  return checked(PyObject_CallFunctionObjArgs(function.ptr(), x.ptr(), nullptr));
}

// --- The lock ------------------------------------------------------------------------------------

class release_gil {
 public:
  release_gil() : state_(PyEval_SaveThread()) {}
  ~release_gil() { PyEval_RestoreThread(state_); }
  release_gil(release_gil const&) = delete;

 private:
  PyThreadState* state_;
};

class acquire_gil {
 public:
  acquire_gil() : state_(PyGILState_Ensure()) {}
  ~acquire_gil() { PyGILState_Release(state_); }
  acquire_gil(acquire_gil const&) = delete;

 private:
  PyGILState_STATE state_;
};

// --- Named tuples --------------------------------------------------------------------------------

// A type of named tuples; `fields` ends with {}.
class record {
 public:
  record(char const* name, char const* doc, std::vector<PyStructSequence_Field> fields)
      : fields_(std::move(fields)) {
    PyStructSequence_Desc desc = {name, doc, fields_.data(), int(fields_.size()) - 1};
    type_ = PyStructSequence_NewType(&desc);
    check(type_ != nullptr);
  }
  template <class... Args>
  object operator()(Args const&... args) const {
    object made = checked(PyStructSequence_New(type_));
    Py_ssize_t i = 0;
    (PyStructSequence_SetItem(made.ptr(), i++, to_python(args).release()), ...);
    return made;
  }
  object type() const { return borrow(reinterpret_cast<PyObject*>(type_)); }

 private:
  std::vector<PyStructSequence_Field> fields_;
  PyTypeObject* type_ = nullptr;
};

}  // namespace cutlass_attn::py
