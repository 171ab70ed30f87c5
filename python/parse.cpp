#include "parse.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "runtime/options.hpp"

namespace py = pybind11;

namespace cutlass_attn {

// --- Scalars -------------------------------------------------------------------------------------

bool boolean(char const* name, PyObject* x) {
  if (PyBool_Check(x)) return x == Py_True;
  raise(PyExc_TypeError, std::string(name) + " must be True or False, got " + repr(x));
}

// Raises if a tensor that is passed as a number requires a gradient.
static void refuse_gradient(char const* name, PyObject* x) {
  if (PyLong_CheckExact(x)) return;
  PyObject* const answer = PyObject_GetAttrString(x, "requires_grad");
  if (answer == nullptr) return PyErr_Clear();
  if (PyObject_IsTrue(checked(answer).ptr()) != 1) return;
  if (!py::module_::import("torch").attr("is_grad_enabled")().cast<bool>()) return;
  raise(PyExc_NotImplementedError,
        std::string(name) + " is a tensor that requires a gradient, which is not computed: pass " +
            name + ".item(), a number" +
            (std::string(name) == "softmax_scale"
                 ? "; to learn it, multiply q by it and pass softmax_scale=1.0"
                 : ""));
}

double number(char const* name, PyObject* x) {
  if (PyFloat_CheckExact(x)) return PyFloat_AS_DOUBLE(x);
  auto const refuse = [&] {
    raise(PyExc_TypeError, std::string(name) + " must be a number, got " + repr(x));
  };
  if (PyUnicode_Check(x) || PyBytes_Check(x) || PyBool_Check(x)) refuse();
  refuse_gradient(name, x);
  PyObject* const value = PyNumber_Float(x);
  if (value != nullptr) return PyFloat_AsDouble(checked(value).ptr());
  if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Clear();
    raise(PyExc_ValueError, std::string(name) + " is beyond any float, allowed: a finite number");
  }
  if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) {
    throw py::error_already_set();
  }
  PyErr_Clear();
  refuse();
  return 0.0;
}

std::string string(char const* name, char const* example, PyObject* x) {
  if (!PyUnicode_Check(x)) {
    raise(PyExc_TypeError,
          std::string(name) + " must be a string such as \"" + example + "\", got " + repr(x));
  }
  Py_ssize_t length = 0;
  char const* const text = PyUnicode_AsUTF8AndSize(x, &length);
  if (text == nullptr) {  // such as half a surrogate pair
    if (!PyErr_ExceptionMatches(PyExc_UnicodeError)) throw py::error_already_set();
    PyErr_Clear();
    raise(PyExc_ValueError,
          std::string(name) + " must be text that UTF-8 can encode, got " + repr(x));
  }
  return {text, size_t(length)};
}

bool is_bshd(PyObject* layout) {
  if (PyUnicode_Check(layout)) {
    if (PyUnicode_CompareWithASCIIString(layout, "bhsd") == 0) return false;
    if (PyUnicode_CompareWithASCIIString(layout, "bshd") == 0) return true;
  }
  raise(PyExc_ValueError, "layout must be \"bhsd\" or \"bshd\", got " + repr(layout));
}

Accumulate accumulate_of(PyObject* x) {
  std::string const name = string("accumulate", "fp32", x);
  constexpr int kLast = kNumAccumulates - 1;
  std::string allowed;
  for (int i = 0; i <= kLast; ++i) {
    std::string const known = name_of(Accumulate(i));
    if (known == name) return Accumulate(i);
    allowed += (i == 0 ? "\"" : i == kLast ? " or \"" : ", \"") + known + "\"";
  }
  raise(PyExc_ValueError, "accumulate must be " + allowed + ", got " + repr(x));
}

Quantize quantize_of(PyObject* x) {
  std::string const name = string("quantize", "qk", x);
  std::string allowed = "None";
  for (int i = 1; i < kNumQuantizes; ++i) {  // 0 is none
    std::string const known = name_of(Quantize(i));
    if (known == name) return Quantize(i);
    allowed += (i + 1 < kNumQuantizes ? ", \"" : " or \"") + known + "\"";
  }
  raise(PyExc_ValueError, "quantize must be " + allowed + ", got " + repr(x));
}

float max_error_of(PyObject* x) {
  float const value = float(number("max_error", x));
  if (value > 0.0f && std::isfinite(value)) return value;
  raise(PyExc_ValueError,
        "max_error is " + repr(x) + ", allowed: a finite number above 0, or None for no limit");
}

namespace {

// Reads an int. Raises TypeError with `message` and the whole argument. `overflow`: 1 or -1 for a
// number beyond long long, else 0.
long long integer(PyObject* x, char const* message, PyObject* argument, int& overflow) {
  PyObject* const index = PyIndex_Check(x) && !PyBool_Check(x) ? PyNumber_Index(x) : nullptr;
  if (index == nullptr) {
    // Arrays of several numbers have __index__ as well, and raise TypeError.
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    raise(PyExc_TypeError, std::string(message) + ", got " + repr(argument));
  }
  return PyLong_AsLongLongAndOverflow(checked(index).ptr(), &overflow);
}

// Reads one side of `window`, in keys. The whole argument is for messages.
int32_t window_side(PyObject* window, PyObject* side) {
  if (side == Py_None) return kUnbounded;
  int overflow = 0;
  long long const count =
      integer(side, "window must be an int or a pair (left, right) of int", window, overflow);
  if (overflow < 0 || (overflow == 0 && count < kUnbounded)) {
    raise(PyExc_ValueError,
          "window counts keys: 0 or more, -1 or None for all; got " + repr(window));
  }
  return overflow > 0 || count > INT32_MAX ? INT32_MAX : int32_t(count);
}

}  // namespace

int32_t count(char const* name, PyObject* x, int32_t least) {
  std::string const text = std::string(name) + " must be an int";
  int overflow = 0;
  long long const value = integer(x, text.c_str(), x, overflow);
  if (overflow == 0 && least <= value && value <= INT32_MAX) return int32_t(value);
  raise(PyExc_ValueError, std::string(name) + " is " + repr(x) +
                              ", allowed: " + std::to_string(least) + " to 2147483647");
}

int32_t attention_chunk_of(PyObject* x) {
  int overflow = 0;
  long long const count = integer(x, "attention_chunk must be an int or None", x, overflow);
  if (overflow == 0 && 1 <= count && count <= kMaxAttentionChunk) return int32_t(count);
  raise(PyExc_ValueError, "attention_chunk is " + repr(x) + ", allowed: 1 to " +
                              std::to_string(kMaxAttentionChunk) + " keys, or None");
}

void read_window(PyObject* window, Mask& mask) {
  PyObject* left = window;
  PyObject* right = window;
  if (PyTuple_Check(window) || PyList_Check(window)) {
    if (PySequence_Fast_GET_SIZE(window) != 2) {
      raise(PyExc_ValueError, "window must be an int or a pair (left, right), got " + repr(window));
    }
    left = PySequence_Fast_GET_ITEM(window, 0);
    right = PySequence_Fast_GET_ITEM(window, 1);
  }
  mask.window_left = window_side(window, left);
  mask.window_right = window_side(window, right);
  if (mask.causal) mask.window_right = kUnbounded;  // a causal mask has no right side
}

// --- Arrays --------------------------------------------------------------------------------------

bool get_dtype(View const& x, DType& dtype) {
  if (x.dtype == dlpack::DataType{dlpack::kFloat, 16, 1}) {
    dtype = DType::kFloat16;
  } else if (x.dtype == dlpack::DataType{dlpack::kBfloat, 16, 1}) {
    dtype = DType::kBFloat16;
  } else if (x.dtype == kFloat32) {
    dtype = DType::kFloat32;
  } else if (x.dtype == kFloat64) {
    dtype = DType::kFloat64;
  } else {
    return false;
  }
  return true;
}

std::string tuple_text(Shape const& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "(" : ", ") + std::to_string(size);
  return text + (shape.ndim == 1 ? ",)" : ")");
}

[[noreturn]] void refuse_dtype(char const* name, View const& x, std::string const& allowed,
                               char const* hint) {
  raise(PyExc_ValueError,
        std::string(name) + " must be " + allowed + ", got " + dtype_text(x) + hint);
}

void require_dtype(char const* name, View const& x, dlpack::DataType dtype, char const* allowed) {
  if (!(x.dtype == dtype)) refuse_dtype(name, x, allowed);
}

int32_t size(char const* name, int64_t value) {
  if (value <= INT32_MAX) return int32_t(value);
  raise(PyExc_ValueError, std::string(name) + " is " + std::to_string(value) +
                              "; sizes of one dimension go up to 2147483647");
}

void require_writable(char const* name, View const& x) {
  if (!x.is_writable) raise(PyExc_ValueError, std::string(name) + " must be writable");
}

void require_memory(char const* name, View const& x) {
  if (x.fault == nullptr) return;
  std::string const message = std::string(name) + " " + x.fault;
  if (x.is_lazy) throw NoMemory(message);
  raise(PyExc_ValueError, message);
}

void require_whole_elements(View const& x) {
  if (x.is_aligned) return;
  std::string const bytes = attribute(x.object, "itemsize");
  raise(PyExc_ValueError, "array of " + dtype_text(x) + " has address or strides " +
                              attribute(x.object, "strides") + " that are no multiple of " + bytes +
                              " bytes; call numpy.ascontiguousarray first");
}

bool is_dense(View const& x) {
  int const last = x.ndim - 1;
  return x.shape[last] <= 1 || x.strides[last] == 1 || std::count(x.shape, x.shape + last, 0) > 0;
}

void require_dense(char const* name, View const& x) {
  if (is_dense(x)) return;
  raise(PyExc_ValueError, std::string("the last dimension of ") + name +
                              " must be contiguous (stride 1), got stride " +
                              std::to_string(x.strides[x.ndim - 1]) + "; call .contiguous() first");
}

Operand operand(char const* name, View const& x, bool bshd, DType dtype) {
  require_memory(name, x);
  require_whole_elements(x);
  require_dense(name, x);
  int const first = x.ndim - 3;  // after the batch
  Operand result;
  result.data = x.data;
  result.batch_stride = first == 1 ? x.strides[0] : 0;
  result.head_stride = x.strides[first + (bshd ? 1 : 0)];
  result.row_stride = x.strides[first + (bshd ? 0 : 1)];
  result.dtype = dtype;
  return result;
}

}  // namespace cutlass_attn
