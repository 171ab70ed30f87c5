// The Python module _C: plain integers in, plain lists and dicts out. It knows neither torch nor
// numpy; python/cutlass_attn reads addresses and strides from either.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

#include "compiler.hpp"
#include "cutlass_attn.hpp"
#include "errors.hpp"
#include "short_path.hpp"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

using namespace cutlass_attn;

// Walks one of the tuples that describe a call. Their layout is stated once more, in Python, by
// _call.Request, _call.describe and _options.Options.describe. Fields are read in place: pybind11's
// own conversion of thirty arguments would take longer than all the rest of a call.
class Reader {
 public:
  Reader(PyObject* fields, Py_ssize_t count) : fields_(fields) {
    if (!PyTuple_Check(fields) || PyTuple_GET_SIZE(fields) != count) {
      raise(PyExc_TypeError, "expected a tuple of " + std::to_string(count) + " fields");
    }
  }

  PyObject* object() { return PyTuple_GET_ITEM(fields_, index_++); }

  int64_t integer() { return integer(object()); }

  template <class T>
  T* address() {
    return reinterpret_cast<T*>(integer());
  }

  int32_t size(char const* name) {
    int64_t const value = integer();
    if (value < 0 || value > INT32_MAX) {
      raise(PyExc_ValueError, std::string(name) + " is " + std::to_string(value) +
                                  "; sizes of one dimension go up to 2147483647");
    }
    return int32_t(value);
  }

  float real() {
    double const value = PyFloat_AsDouble(object());
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return float(value);
  }

  // Address, then the four strides, in elements, in the order of the layout.
  TensorRef operand(char const* name, bool bshd, bool has_rows, int32_t row_size) {
    TensorRef ref;
    ref.data = address<void>();
    Reader strides(object(), 4);
    ref.batch_stride = strides.integer();
    int64_t const second = strides.integer(), third = strides.integer(), last = strides.integer();
    ref.head_stride = bshd ? third : second;
    ref.row_stride = bshd ? second : third;
    if (last != 1 && has_rows && row_size > 1) {
      raise(PyExc_ValueError, std::string("the last dimension of ") + name +
                                  " must be contiguous (stride 1), got stride " +
                                  std::to_string(last) + "; call .contiguous() first");
    }
    return ref;
  }

  // Address, then the strides, in elements, of (batch, num_heads_q, seqlen_q, seqlen_k).
  LogitRef per_logit() {
    LogitRef ref;
    ref.data = address<void const>();
    Reader strides(object(), 4);
    ref.batch_stride = strides.integer();
    ref.head_stride = strides.integer();
    ref.row_stride = strides.integer();
    ref.key_stride = strides.integer();
    return ref;
  }

 private:
  static int64_t integer(PyObject* object) {
    long long const value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  PyObject* fields_;
  Py_ssize_t index_ = 0;
};

void read_options(PyObject* options, AttnParams& p) {
  Reader read(options, 10);
  p.bias = read.per_logit();
  p.bias_dtype = static_cast<DType>(read.integer());
  p.mask = read.per_logit();
  p.alibi_slopes = read.address<float const>();
  p.alibi_batch_stride = read.integer();
  p.sinks = read.address<float const>();
  p.dropout_p = read.real();
  p.rng_state = read.address<uint64_t const>();
}

AttnParams read_params(py::tuple const& call) {
  Reader read(call.ptr(), 25);
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
  p.accumulate = static_cast<Accumulate>(read.integer());
  bool const has_queries = p.batch && p.num_heads_q && p.seqlen_q;
  bool const has_keys = p.batch && p.num_heads_kv && p.seqlen_k;
  p.q = read.operand("q", bshd, has_queries, p.head_dim);
  p.k = read.operand("k", bshd, has_keys, p.head_dim);
  p.v = read.operand("v", bshd, has_keys, p.head_dim_v);
  p.o = read.operand("out", bshd, has_queries, p.head_dim_v);
  p.softmax_lse = read.address<float>();
  if (PyObject* const options = read.object(); options != Py_None) read_options(options, p);
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

// A compute capability asks about a GPU that need not be present, 0 about the device at hand.
py::list explain_call(py::tuple const& call, int device, int device_index, int compute_capability,
                      std::string const& kernel) {
  AttnParams params = read_params(call);
  // An output that is not there yet and tensors without memory (torch's "meta" device) pose as
  // aligned ones that overlap nothing.
  for (TensorRef* t : {&params.q, &params.k, &params.v, &params.o}) {
    if (t->data == nullptr)
      t->data = reinterpret_cast<void*>(int64_t(t == &params.o ? 3 : 1) << 60);
  }
  raise_unless_ok(check(params));
  DeviceInfo const where = compute_capability
                               ? typical_device(compute_capability)
                               : device_info(static_cast<Device>(device), device_index);
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
                         "dtype"_a = int(v.dtype), "head_dim"_a = v.head_dim,
                         "head_dim_v"_a = v.head_dim_v, "head_dim_multiple"_a = v.head_dim_multiple,
                         "tile"_a = v.tile, "accumulate"_a = int(v.accumulate),
                         "options"_a = py::tuple(py::cast(v.options)), "tier"_a = v.tier,
                         "compiled"_a = v.compiled, "automatic"_a = v.automatic));
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
  m.def("short_path",
        [](py::type tensor, py::capsule exchange_api, py::object empty_like,
           py::object contiguous_format, py::object is_neg, py::object is_grad_enabled,
           py::object num_threads, py::tuple interceptors) {
          return make_short_path({std::move(tensor), std::move(exchange_api), std::move(empty_like),
                                  std::move(contiguous_format), std::move(is_neg),
                                  std::move(is_grad_enabled), std::move(num_threads),
                                  std::move(interceptors)});
        });
  m.def("device_info", [](int device, int index) {
    DeviceInfo const info = device_info(static_cast<Device>(device), index);
    return py::make_tuple(info.compute_capability, info.unavailable);
  });
  define_compiler(m);
  m.def("add_tile", [](std::string kernel, int head_dim, int head_dim_v, std::string tile,
                       int block_m, int threads, int smem_bytes) {
    raise_unless_ok(add_tile(
        {std::move(kernel), head_dim, head_dim_v, std::move(tile), block_m, threads, smem_bytes}));
  });
  m.def("prefer_tile", [](int smem_kb, std::string kernel, int head_dim, int head_dim_v,
                          std::string tile, float min_blocks_per_sm, bool decode) {
    raise_unless_ok(prefer_tile({smem_kb, std::move(kernel), head_dim, head_dim_v, std::move(tile),
                                 min_blocks_per_sm, decode}));
  });
  m.def("tile_rules", [] {
    py::list list;
    for (TileRule const& rule : tile_rules()) {
      list.append(py::make_tuple(rule.smem_kb, rule.kernel, rule.head_dim, rule.head_dim_v,
                                 rule.tile, rule.min_blocks_per_sm, rule.decode));
    }
    return list;
  });
  m.def("mark_failing", [](int smem_kb, std::string const& key, std::string reason) {
    raise_unless_ok(mark_failing(smem_kb, key, std::move(reason)));
  });
}
