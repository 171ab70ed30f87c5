// The Python module _C: plain integers in, plain lists and dicts out. It knows neither torch nor
// numpy; python/cutlass_attn reads addresses and strides from either.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

#include "cutlass_attn.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

using namespace cutlass_attn;

[[noreturn]] void raise(PyObject* type, std::string const& message) {
  PyErr_SetString(type, message.c_str());
  throw py::error_already_set();
}

void raise_unless_ok(Status const& status) {
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

// Walks the tuple that describes a call. Its layout is stated once more, in Python, by
// _call.Request and _call.describe. Fields are read in place: pybind11's own conversion
// of thirty arguments would take longer than all the rest of a call.
class Reader {
 public:
  explicit Reader(py::tuple const& fields) : fields_(fields.ptr()) {
    if (PyTuple_GET_SIZE(fields_) != kFields) {
      raise(PyExc_TypeError, "a call is described by " + std::to_string(kFields) + " fields");
    }
  }

  int64_t integer() { return integer(next()); }

  int32_t size(char const* name) {
    int64_t const value = integer();
    if (value < 0 || value > INT32_MAX) {
      raise(PyExc_ValueError, std::string(name) + " is " + std::to_string(value) +
                                  "; sizes of one dimension go up to 2147483647");
    }
    return int32_t(value);
  }

  float real() {
    double const value = PyFloat_AsDouble(next());
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return float(value);
  }

  // Address, then the four strides, in elements, in the order of the layout.
  TensorRef operand(char const* name, bool bshd, bool has_rows, int32_t row_size) {
    TensorRef ref;
    ref.data = reinterpret_cast<void*>(integer());
    PyObject* const strides = next();
    if (!PyTuple_Check(strides) || PyTuple_GET_SIZE(strides) != 4) {
      raise(PyExc_TypeError, std::string(name) + " needs a tuple of 4 strides");
    }
    auto const stride = [&](int i) { return integer(PyTuple_GET_ITEM(strides, i)); };
    ref.batch_stride = stride(0);
    ref.head_stride = stride(bshd ? 2 : 1);
    ref.row_stride = stride(bshd ? 1 : 2);
    if (stride(3) != 1 && has_rows && row_size > 1) {
      raise(PyExc_ValueError, std::string("the last dimension of ") + name +
                                  " must be contiguous (stride 1), got stride " +
                                  std::to_string(stride(3)) + "; call .contiguous() first");
    }
    return ref;
  }

 private:
  static constexpr Py_ssize_t kFields = 23;

  PyObject* next() { return PyTuple_GET_ITEM(fields_, index_++); }

  static int64_t integer(PyObject* object) {
    long long const value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  PyObject* fields_;
  Py_ssize_t index_ = 0;
};

AttnParams read_params(py::tuple const& call) {
  Reader read(call);
  AttnParams p;
  p.dtype = static_cast<DType>(read.integer());
  bool const bshd = read.integer() != 0;
  p.batch = read.size("the batch");
  p.num_heads_q = read.size("the number of query heads");
  p.num_heads_kv = read.size("the number of key/value heads");
  p.seqlen_q = read.size("the query length");
  p.seqlen_k = read.size("the key length");
  p.head_dim = read.size("the head dim of q and k");
  p.head_dim_v = read.size("the head dim of v");
  p.softmax_scale = read.real();
  p.softcap = read.real();
  p.causal = read.integer() != 0;
  p.window_left = int32_t(read.integer());
  p.window_right = int32_t(read.integer());
  bool const has_queries = p.batch && p.num_heads_q && p.seqlen_q;
  bool const has_keys = p.batch && p.num_heads_kv && p.seqlen_k;
  p.q = read.operand("q", bshd, has_queries, p.head_dim);
  p.k = read.operand("k", bshd, has_keys, p.head_dim);
  p.v = read.operand("v", bshd, has_keys, p.head_dim_v);
  p.o = read.operand("out", bshd, has_queries, p.head_dim_v);
  p.softmax_lse = reinterpret_cast<float*>(read.integer());
  return p;
}

void forward(py::tuple const& call, int device, int device_index, std::uintptr_t stream,
             std::string kernel, int num_threads) {
  AttnParams const params = read_params(call);
  LaunchOptions options;
  options.device = static_cast<Device>(device);
  options.device_index = device_index;
  options.stream = reinterpret_cast<void*>(stream);
  options.kernel = std::move(kernel);
  options.num_threads = num_threads;
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = attention_forward(params, options);
  }
  raise_unless_ok(status);
}

py::list explain_call(py::tuple const& call, int device, int compute_capability,
                      std::string unavailable, std::string const& kernel) {
  AttnParams params = read_params(call);
  // An output that is not there yet and tensors without memory (torch's "meta" device) pose as
  // aligned ones that overlap nothing.
  for (TensorRef* t : {&params.q, &params.k, &params.v, &params.o}) {
    if (t->data == nullptr)
      t->data = reinterpret_cast<void*>(int64_t(t == &params.o ? 3 : 1) << 60);
  }
  raise_unless_ok(check(params));
  DeviceInfo const where{static_cast<Device>(device), compute_capability, std::move(unavailable)};
  py::list verdicts;
  for (Verdict const& verdict : explain(params, where, kernel)) {
    verdicts.append(py::make_tuple(verdict.key, verdict.chosen, verdict.reason));
  }
  return verdicts;
}

py::list variant_list() {
  py::list list;
  for (VariantInfo const& v : variants()) {
    list.append(py::dict("key"_a = v.key, "kernel"_a = v.kernel,
                         "device"_a = v.device == Device::kCuda ? "cuda" : "cpu",
                         "dtype"_a = int(v.dtype), "head_dim"_a = v.head_dim, "tile"_a = v.tile,
                         "tier"_a = v.tier, "compiled"_a = v.compiled,
                         "automatic"_a = v.automatic));
  }
  return list;
}

py::dict build() {
  BuildInfo const info = build_info();
  return py::dict("version"_a = info.version, "tier"_a = info.tier, "cuda"_a = info.cuda,
                  "architectures"_a = info.architectures, "cutlass"_a = info.cutlass,
                  "compiler"_a = info.compiler, "simt"_a = info.simt);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "cutlass_attn's kernels on raw addresses; use cutlass_attn.attention instead.";
  m.def("forward", &forward);
  m.def("explain", &explain_call);
  m.def("variants", &variant_list);
  m.def("build_info", &build);
  m.def("device_info", [](int device, int index) {
    DeviceInfo const info = device_info(static_cast<Device>(device), index);
    return py::make_tuple(info.compute_capability, info.unavailable);
  });
}
