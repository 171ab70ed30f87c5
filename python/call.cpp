#include "call.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>

#include "errors.hpp"
#include "runtime/options.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

// --- Arguments by name ---------------------------------------------------------------------------

struct Keyword {
  char const* name;
  PyObject* Arguments::* value;
};

constexpr Keyword kKeywords[] = {
    {"causal", &Arguments::causal},
    {"window", &Arguments::window},
    {"attention_chunk", &Arguments::attention_chunk},
    {"softmax_scale", &Arguments::softmax_scale},
    {"softcap", &Arguments::softcap},
    {"layout", &Arguments::layout},
    {"return_lse", &Arguments::return_lse},
    {"out", &Arguments::out},
    {"kernel", &Arguments::kernel},
    {"accumulate", &Arguments::accumulate},
    {"verify", &Arguments::verify},
    {"bias", &Arguments::bias},
    {"mask", &Arguments::mask},
    {"alibi_slopes", &Arguments::alibi_slopes},
    {"sinks", &Arguments::sinks},
    {"dropout_p", &Arguments::dropout_p},
    {"rng_state", &Arguments::rng_state},
    {"dispatched", &Arguments::dispatched},
    {"device", &Arguments::device},
};
constexpr size_t kNumKeywords = std::size(kKeywords);

PyObject* g_names[kNumKeywords];  // interned, as those that Python's compiler puts into a call

Keyword const& find(char const* function, PyObject* name) {
  for (size_t i = 0; i < kNumKeywords; ++i) {
    if (g_names[i] == name) return kKeywords[i];
  }
  for (size_t i = 0; i < kNumKeywords; ++i) {
    if (PyUnicode_Check(name) && PyUnicode_Compare(g_names[i], name) == 0) return kKeywords[i];
  }
  raise(PyExc_TypeError,
        std::string(function) + "() got an unexpected keyword argument " + repr(name));
}

// --- Scalars -------------------------------------------------------------------------------------

bool boolean(char const* name, PyObject* x) {
  if (PyBool_Check(x)) return x == Py_True;
  raise(PyExc_TypeError, std::string(name) + " must be True or False, got " + repr(x));
}

float number(char const* name, PyObject* x) {
  if (PyFloat_CheckExact(x)) return float(PyFloat_AS_DOUBLE(x));
  auto const refuse = [&] {
    raise(PyExc_TypeError, std::string(name) + " must be a number, got " + repr(x));
  };
  if (PyUnicode_Check(x) || PyBytes_Check(x) || PyBool_Check(x)) refuse();
  PyObject* const value = PyNumber_Float(x);
  if (value != nullptr) return float(PyFloat_AsDouble(checked(value).ptr()));
  if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Clear();
    raise(PyExc_ValueError, std::string(name) + " is beyond any float, allowed: a finite number");
  }
  if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) {
    throw py::error_already_set();
  }
  PyErr_Clear();
  refuse();
  return 0.0f;
}

std::string string(char const* name, char const* example, PyObject* x) {
  if (!PyUnicode_Check(x)) {
    raise(PyExc_TypeError,
          std::string(name) + " must be a string such as \"" + example + "\", got " + repr(x));
  }
  Py_ssize_t length = 0;
  char const* const text = PyUnicode_AsUTF8AndSize(x, &length);
  if (text == nullptr) {  // half a surrogate pair, say
    if (!PyErr_ExceptionMatches(PyExc_UnicodeError)) throw py::error_already_set();
    PyErr_Clear();
    raise(PyExc_ValueError, std::string(name) + " must be text that UTF-8 has, got " + repr(x));
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

// An int, or TypeError with a message on the whole argument that it is of. `overflow`: the sign of
// what is beyond a long long.
long long integer(PyObject* x, char const* message, PyObject* argument, int& overflow) {
  PyObject* const index = PyIndex_Check(x) && !PyBool_Check(x) ? PyNumber_Index(x) : nullptr;
  if (index == nullptr) {
    // Arrays of several numbers have the method, and answer with a TypeError.
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    raise(PyExc_TypeError, std::string(message) + ", got " + repr(argument));
  }
  return PyLong_AsLongLongAndOverflow(checked(index).ptr(), &overflow);
}

// A number of keys that `window` names; the whole of it is for messages.
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

constexpr dlpack::DataType kFloat32 = {dlpack::kFloat, 32, 1};

// Of an array that a null address would say is not there.
void* const kNoMemory = reinterpret_cast<void*>(int64_t(1) << 60);

// False for a dtype that the library does not have.
bool get_dtype(View const& x, DType& dtype) {
  if (x.dtype == dlpack::DataType{dlpack::kFloat, 16, 1}) {
    dtype = DType::kFloat16;
  } else if (x.dtype == dlpack::DataType{dlpack::kBfloat, 16, 1}) {
    dtype = DType::kBFloat16;
  } else if (x.dtype == kFloat32) {
    dtype = DType::kFloat32;
  } else {
    return false;
  }
  return true;
}

std::string dtype_text(View const& x) { return attribute(x.object, "dtype"); }
std::string device_text(View const& x) { return attribute(x.object, "device"); }

// "(2, 4)", "(4,)": as Python writes tuples.
std::string tuple_text(std::initializer_list<int64_t> sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "(" : ", ") + std::to_string(size);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

[[noreturn]] void refuse_dtype(char const* name, View const& x, std::string const& allowed) {
  raise(PyExc_ValueError, std::string(name) + " must be " + allowed + ", got " + dtype_text(x));
}

int32_t size(char const* name, int64_t value) {
  if (value <= INT32_MAX) return int32_t(value);
  raise(PyExc_ValueError, std::string(name) + " is " + std::to_string(value) +
                              "; sizes of one dimension go up to 2147483647");
}

void require_whole_elements(View const& x) {
  if (x.is_aligned) return;
  std::string const bytes = attribute(x.object, "itemsize");
  raise(PyExc_ValueError, "array of " + dtype_text(x) + " has address or strides " +
                              attribute(x.object, "strides") + " that are no multiple of " + bytes +
                              " bytes; call numpy.ascontiguousarray first");
}

void require_dense(char const* name, View const& x) {
  int const last = x.ndim - 1;
  if (x.shape[last] <= 1 || x.strides[last] == 1 || std::count(x.shape, x.shape + last, 0) > 0) {
    return;
  }
  raise(PyExc_ValueError, std::string("the last dimension of ") + name +
                              " must be contiguous (stride 1), got stride " +
                              std::to_string(x.strides[last]) + "; call .contiguous() first");
}

Operand operand(char const* name, View const& x, bool bshd, DType dtype) {
  require_whole_elements(x);
  require_dense(name, x);
  Operand result;
  result.data = x.data;
  result.batch_stride = x.strides[0];
  result.head_stride = x.strides[bshd ? 2 : 1];
  result.row_stride = x.strides[bshd ? 1 : 2];
  result.dtype = dtype;
  return result;
}

template <class T>
T const* address(View const& x) {
  return static_cast<T const*>(x.data ? x.data : kNoMemory);
}

// What q, k and v must have in common.
void check_operands(View const& q, View const& k, View const& v, bool bshd) {
  if (q.ndim != 4 || k.ndim != 4 || v.ndim != 4) {
    raise(PyExc_ValueError,
          std::string("q, k and v must have 4 dimensions, ") +
              (bshd ? "(batch, seqlen, heads, head_dim)" : "(batch, heads, seqlen, head_dim)") +
              ", got q " + shape_of(q.object) + ", k " + shape_of(k.object) + ", v " +
              shape_of(v.object));
  }
  auto const of = [](View const& x, int d) { return std::to_string(x.shape[d]); };
  int const head = bshd ? 2 : 1, row = bshd ? 1 : 2;
  if (k.shape[0] != q.shape[0] || v.shape[0] != q.shape[0]) {
    raise(PyExc_ValueError, "q, k and v must have one batch size, got " + of(q, 0) + ", " +
                                of(k, 0) + ", " + of(v, 0));
  }
  if (k.shape[3] != q.shape[3]) {
    raise(PyExc_ValueError, "q and k must have one head dim, got " + of(q, 3) + " and " + of(k, 3));
  }
  if (v.shape[head] != k.shape[head]) {
    raise(PyExc_ValueError,
          "k and v must have as many heads, got " + of(k, head) + " and " + of(v, head));
  }
  if (v.shape[row] != k.shape[row]) {
    raise(PyExc_ValueError,
          "k and v must be as long, got " + of(k, row) + " and " + of(v, row) + " keys");
  }
  if (!(k.dtype == q.dtype) || !(v.dtype == q.dtype)) {
    raise(PyExc_ValueError, "q, k and v must have one dtype, got " + dtype_text(q) + ", " +
                                dtype_text(k) + ", " + dtype_text(v));
  }
  if (!(k.device == q.device) || !(v.device == q.device)) {
    raise(PyExc_ValueError, "q, k and v must be on one device, got " + device_text(q) + ", " +
                                device_text(k) + ", " + device_text(v));
  }
}

}  // namespace

void Arguments::prepare() {
  for (size_t i = 0; i < kNumKeywords; ++i) {
    g_names[i] = PyUnicode_InternFromString(kKeywords[i].name);
    if (g_names[i] == nullptr) throw py::error_already_set();
  }
}

Arguments::Arguments(char const* function, PyObject* const* args, Py_ssize_t count,
                     PyObject* names) {
  if (count != 4 || !PyDict_Check(args[3])) {
    raise(PyExc_TypeError, std::string(function) + "() takes q, k, v and a dict of options");
  }
  q = args[0];
  k = args[1];
  v = args[2];
  options = args[3];
  PyObject *name, *value;
  for (Py_ssize_t at = 0; PyDict_Next(options, &at, &name, &value);) {
    this->*find(function, name).value = value;
  }
  if (dispatched != nullptr || device != nullptr) {  // of this package alone
    raise(PyExc_TypeError, std::string(function) + "() got an unexpected keyword argument '" +
                               (dispatched != nullptr ? "dispatched'" : "device'"));
  }
  Py_ssize_t const named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    this->*find(function, PyTuple_GET_ITEM(names, i)).value = args[count + i];
  }
}

Call::Call(Arguments const& given) : library(&library_of(given.q, given.k, given.v)) {
  for (PyObject* x : {given.q, given.k, given.v}) arrays.add(x);
  struct {
    char const* name;
    PyObject* x;
  } const optional[] = {
      {"bias", given.bias},   {"mask", given.mask},           {"alibi_slopes", given.alibi_slopes},
      {"sinks", given.sinks}, {"rng_state", given.rng_state}, {"out", given.out}};
  for (auto const& [name, x] : optional) {
    if (!has_value(x)) continue;
    if (!library->has(x)) {
      raise(PyExc_TypeError,
            std::string(name) + " must be an array of the same library as q, got " + type_name(x));
    }
    arrays.add(x);
  }

  Problem& p = problem;
  if (given.layout) bshd = is_bshd(given.layout);
  if (given.causal) p.mask.causal = boolean("causal", given.causal);
  if (given.return_lse) return_lse = boolean("return_lse", given.return_lse);
  if (given.verify) boolean("verify", given.verify);  // which Python sees to
  if (has_value(given.window)) read_window(given.window, p.mask);
  if (has_value(given.attention_chunk)) {
    p.mask.attention_chunk = attention_chunk_of(given.attention_chunk);
  }
  if (has_value(given.softmax_scale)) {
    p.logits.softmax_scale = number("softmax_scale", given.softmax_scale);
  }
  if (given.softcap) p.logits.softcap = number("softcap", given.softcap);
  if (given.dropout_p) p.dropout.p = number("dropout_p", given.dropout_p);
  if (given.accumulate) p.accumulate = accumulate_of(given.accumulate);
  if (given.kernel) kernel = string("kernel", "auto", given.kernel);
}

void Call::read_arrays(Arguments const& given, bool memory) {
  q = library->read(given.q, memory);
  View const k = library->read(given.k, memory), v = library->read(given.v, memory);
  DType dtype;
  if (!get_dtype(q, dtype)) {
    std::string allowed = name_of(DType(0));
    for (int i = 1; i < kNumDTypes; ++i) {
      allowed += (i + 1 < kNumDTypes ? ", " : " or ") + std::string(name_of(DType(i)));
    }
    raise(PyExc_TypeError, "q must be " + allowed + ", got " + dtype_text(q));
  }
  check_operands(q, k, v, bshd);

  Problem& p = problem;
  int const head = bshd ? 2 : 1, row = bshd ? 1 : 2;
  p.batch = size("the batch", q.shape[0]);
  p.num_heads_q = size("the number of query heads", q.shape[head]);
  p.num_heads_kv = size("the number of key/value heads", k.shape[head]);
  p.seq_q.seqlen = size("the query length", q.shape[row]);
  p.seq_k.seqlen = size("the key length", k.shape[row]);
  p.head_dim = size("the head dim of q and k", q.shape[3]);
  p.head_dim_v = size("the head dim of v", v.shape[3]);
  p.q = operand("q", q, bshd, dtype);
  p.k = operand("k", k, bshd, dtype);
  p.v = operand("v", v, bshd, dtype);
  if (!has_value(given.softmax_scale) && p.head_dim > 0) {
    p.logits.softmax_scale = float(1.0 / std::sqrt(double(p.head_dim)));
  }
  p.logits.bias_dtype = dtype;
  if (arrays.count > 3 || p.dropout.p != 0.0f) read_options(given, memory);
}

View Call::read_option(char const* name, PyObject* x, bool memory) const {
  View const view = library->read(x, memory);
  if (!(view.device == q.device)) {
    raise(PyExc_ValueError, std::string(name) + " must be on " + device_text(q) + " like q, got " +
                                device_text(view));
  }
  require_whole_elements(view);
  return view;
}

PerLogit Call::read_per_logit(char const* name, View const& x) const {
  Problem const& p = problem;
  int64_t const shape[] = {p.batch, p.num_heads_q, p.seq_q.seqlen, p.seq_k.seqlen};
  int64_t strides[4] = {};
  bool fits = 1 <= x.ndim && x.ndim <= 4;
  for (int d = 0; d < x.ndim && fits; ++d) {
    int const whole = d + 4 - x.ndim;
    fits = x.shape[d] == 1 || x.shape[d] == shape[whole];
    if (x.shape[d] != 1) strides[whole] = x.strides[d];
  }
  if (!fits) {
    raise(PyExc_ValueError,
          std::string(name) +
              " must have 1 to 4 dimensions that broadcast to (batch, num_heads_q, "
              "seqlen_q, seqlen_k) = " +
              tuple_text({shape[0], shape[1], shape[2], shape[3]}) + ", got shape " +
              shape_of(x.object));
  }
  return {address<void>(x), strides[0], strides[1], strides[2], strides[3]};
}

void Call::read_options(Arguments const& given, bool memory) {
  Problem& p = problem;
  if (has_value(given.bias)) {
    View const x = read_option("bias", given.bias, memory);
    p.logits.bias = read_per_logit("bias", x);
    DType const like_q = p.q.dtype;
    if (!(x.dtype == q.dtype) && !(x.dtype == kFloat32)) {
      std::string const name = name_of(like_q);
      refuse_dtype("bias", x, name + " like q" + (like_q == DType::kFloat32 ? "" : ", or float32"));
    }
    get_dtype(x, p.logits.bias_dtype);
  }
  if (has_value(given.mask)) {
    View const x = read_option("mask", given.mask, memory);
    p.mask.elements = read_per_logit("mask", x);
    if (x.dtype.code != dlpack::kBool)
      refuse_dtype("mask", x, "bool, True where a query sees a key");
  }

  int64_t const heads = p.num_heads_q;
  auto const has_shape = [](View const& x, std::initializer_list<int64_t> shape) {
    return x.ndim == int(shape.size()) && std::equal(shape.begin(), shape.end(), x.shape);
  };
  if (has_value(given.alibi_slopes)) {
    View const x = read_option("alibi_slopes", given.alibi_slopes, memory);
    if (!has_shape(x, {heads}) && !has_shape(x, {p.batch, heads})) {
      raise(PyExc_ValueError,
            "alibi_slopes must have shape (num_heads_q,) = " + tuple_text({heads}) +
                " or (batch, num_heads_q) = " + tuple_text({p.batch, heads}) + ", got " +
                shape_of(x.object));
    }
    if (!(x.dtype == kFloat32)) refuse_dtype("alibi_slopes", x, "float32");
    require_dense("alibi_slopes", x);
    p.logits.alibi_slopes = address<float>(x);
    p.logits.alibi_batch_stride = x.ndim == 2 ? x.strides[0] : 0;
  }
  if (has_value(given.sinks)) {
    View const x = read_option("sinks", given.sinks, memory);
    if (!has_shape(x, {heads})) {
      raise(PyExc_ValueError, "sinks must have shape (num_heads_q,) = " + tuple_text({heads}) +
                                  ", got " + shape_of(x.object));
    }
    if (!(x.dtype == kFloat32)) refuse_dtype("sinks", x, "float32");
    require_dense("sinks", x);
    p.logits.sinks = address<float>(x);
  }
  // Where there is none yet, whoever launches the call draws it.
  if (p.dropout.p != 0.0f) p.dropout.rng_state = static_cast<uint64_t const*>(kNoMemory);
  if (has_value(given.rng_state)) {
    View const x = read_option("rng_state", given.rng_state, memory);
    if (!has_shape(x, {2})) {
      raise(PyExc_ValueError,
            "rng_state must have shape (2,), a seed and an offset, got " + shape_of(x.object));
    }
    bool const is_integer = x.dtype.code == dlpack::kInt || x.dtype.code == dlpack::kUInt;
    if (!is_integer || x.dtype.bits != 64) refuse_dtype("rng_state", x, "int64 or uint64");
    require_dense("rng_state", x);
    if (p.dropout.p != 0.0f) p.dropout.rng_state = address<uint64_t>(x);
  }
}

void Call::read_out(PyObject* out, bool memory) {
  View const x = library->read(out, memory);
  std::array<int64_t, 4> const shape = out_shape();
  if (x.ndim != 4 || !std::equal(shape.begin(), shape.end(), x.shape)) {
    raise(PyExc_ValueError, "out must have shape " +
                                tuple_text({shape[0], shape[1], shape[2], shape[3]}) + ", got " +
                                shape_of(out));
  }
  if (!(x.dtype == q.dtype)) {
    refuse_dtype("out", x, std::string(name_of(problem.q.dtype)) + " like q");
  }
  if (!(x.device == q.device)) {
    raise(PyExc_ValueError, "out must be on " + device_text(q) + " like q, got " + device_text(x));
  }
  if (!x.is_writable) raise(PyExc_ValueError, "out must be writable");
  problem.o = operand("out", x, bshd, problem.q.dtype);
}

void Call::assume_memory(Arguments const& given) {
  Problem& p = problem;
  if (!has_value(given.out)) {
    std::array<int64_t, 4> const shape = out_shape();
    int64_t const second = shape[2] * shape[3], third = shape[3];
    p.o = {nullptr, shape[1] * second, bshd ? third : second, bshd ? second : third, p.q.dtype};
  }
  for (Operand* t : {&p.q, &p.k, &p.v, &p.o}) {
    int64_t const place = t == &p.o ? 3 : 1;
    if (t->data == nullptr) t->data = reinterpret_cast<void*>(place << 60);
  }
}

std::array<int64_t, 4> Call::out_shape() const {
  int64_t const heads = problem.num_heads_q, rows = problem.seq_q.seqlen;
  return {problem.batch, bshd ? rows : heads, bshd ? heads : rows, problem.head_dim_v};
}

std::array<int64_t, 3> Call::lse_shape() const {
  return {problem.batch, problem.num_heads_q, problem.seq_q.seqlen};
}

}  // namespace cutlass_attn
