#include "prequantized.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "call.hpp"
#include "entry.hpp"
#include "errors.hpp"
#include "parse.hpp"
#include "prequantize.hpp"
#include "runtime/options.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

py::object version_of(py::object const& x) {
  PyObject* const version = PyObject_GetAttrString(x.ptr(), "_version");
  if (version != nullptr) return py::reinterpret_steal<py::object>(version);
  PyErr_Clear();  // numpy arrays and inference tensors have none
  return py::none();
}

// Strides in memory order. A dimension of size 0 or 1 may have any stride.
bool is_same(Operand const& a, Operand const& b, Problem const& p) {
  auto const same = [](int32_t entries, int64_t x, int64_t y) { return entries <= 1 || x == y; };
  return a.data == b.data && same(p.batch, a.batch_stride, b.batch_stride) &&
         same(p.num_heads_kv, a.head_stride, b.head_stride) &&
         same(p.seq_k.seqlen, a.row_stride, b.row_stride);
}

std::string sizes_of(Problem const& p, int32_t head_dim) {
  return tuple_text({p.batch, p.num_heads_kv, p.seq_k.seqlen, head_dim});
}

[[noreturn]] void refuse(std::string const& name, std::string const& kept, std::string const& got) {
  raise(PyExc_ValueError, "quantize is the PrequantizedKV of another " + name +
                              ", (batch, heads, "
                              "seqlen, head_dim) = " +
                              kept + ", than the call's, " + got +
                              "; allowed: the same memory, sizes, strides and dtype");
}

}  // namespace

void Prequantized::require_same(Problem const& call, bool has_memory) const {
  Problem const& p = problem;
  bool const same_sizes = call.batch == p.batch && call.num_heads_kv == p.num_heads_kv &&
                          call.seq_k.seqlen == p.seq_k.seqlen && call.k.dtype == p.k.dtype;
  bool const is_k = same_sizes && call.head_dim == p.head_dim;
  if (!is_k || (has_memory && !is_same(call.k, p.k, p))) {
    refuse("k", sizes_of(p, p.head_dim), sizes_of(call, call.head_dim));
  }
  bool const is_v = call.head_dim_v == p.head_dim_v;
  if (!is_v || (has_memory && !is_same(call.v, p.v, p))) {
    refuse("v", sizes_of(p, p.head_dim_v), sizes_of(call, call.head_dim_v));
  }
  for (int i = 0; i < 2; ++i) {
    py::object const now = version_of(i == 0 ? k : v);
    if (now.equal(versions[i])) continue;
    std::string const name = i == 0 ? "k" : "v";
    raise(PyExc_ValueError, name + " was written to after prequantize(): its version is " +
                                repr(now.ptr()) + ", and was " + repr(versions[i].ptr()) +
                                "; call prequantize() again");
  }
}

Prequantized const* prequantized_of(PyObject* quantize) {
  py::handle const object(quantize);
  return py::isinstance<Prequantized>(object) ? object.cast<Prequantized const*>() : nullptr;
}

namespace {

py::object prequantize_call(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kAttention, "prequantize", args, count, names);
  quantize_of(given.quantize);  // rejects None and a PrequantizedKV
  Call call(given);
  if (call.library->must_see(call.arrays)) {
    raise(PyExc_ValueError, attribute(py::module_::import("cutlass_attn._call.torch_library").ptr(),
                                      "NO_PREQUANTIZED"));
  }
  if (call.library->needs_gradient(call.arrays)) {
    raise(PyExc_NotImplementedError,
          "prequantize has no gradient, and k or v requires one; detach it, or call under "
          "torch.no_grad()");
  }
  call.read_arrays(given, true);
  if (call.q.device.type == dlpack::kOtherDevice) {
    raise(PyExc_ValueError, "k and v must be on a CPU or CUDA device, got " + device_text(call.q));
  }
  auto made = std::make_unique<Prequantized>();
  made->k = py::reinterpret_borrow<py::object>(given.k);
  made->v = py::reinterpret_borrow<py::object>(given.v);
  made->versions[0] = version_of(made->k);
  made->versions[1] = version_of(made->v);
  made->memory = py::none();
  made->problem = call.problem;
  call.assume_memory(given);
  LaunchOptions const options = call.place();
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = prequantize(call.problem, options);
  }
  raise_unless_ok(status);
  if (!call.held.empty()) {
    made->memory = call.held.back();
    View const bytes = call.library->read(made->memory.ptr(), true);
    made->workspace = {bytes.data, bytes.shape[0]};
  }
  return py::cast(std::move(made));
}

// The predicted error of each query head of a call with arrays on the CPU, as a list: for the CPU
// or, with `device`, for a GPU.
py::object predict_call(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kAttention, "predict", args, count, names);
  Call call(given);
  call.read_arrays(given, true);
  call.assume_memory(given);
  LaunchOptions options = call.place();
  if (has_value(given.device)) options.device = Device::kCuda;
  std::vector<float> errors(size_t(call.problem.batch) * size_t(call.problem.num_heads_q));
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = predict_errors(call.problem, options, errors.data());
  }
  raise_unless_ok(status);
  py::list result;
  for (float error : errors) result.append(error);
  return std::move(result);
}

}  // namespace

void define_prequantized(py::module_& m) {
  py::class_<Prequantized>(m, "PrequantizedKV",
                           "K and V rounded to 8 bits, by `prequantize`: the `quantize` of calls.")
      .def_readonly("k", &Prequantized::k)
      .def_readonly("v", &Prequantized::v)
      .def_property_readonly("quantize",
                             [](Prequantized const& x) { return name_of(x.problem.quantize); })
      .def_property_readonly("nbytes", [](Prequantized const& x) { return x.workspace.bytes; })
      .def("__repr__", [](Prequantized const& x) {
        return std::string("PrequantizedKV(\"") + name_of(x.problem.quantize) + "\", k " +
               shape_of(x.k.ptr()) + ", v " + shape_of(x.v.ptr()) + ", " +
               std::to_string(x.workspace.bytes) + " bytes)";
      });
  static PyMethodDef methods[] = {
      method<prequantize_call>("prequantize", "Makes a PrequantizedKV."),
      method<predict_call>("predict", "The predicted errors of a call's heads, on a CPU."),
      {},
  };
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace cutlass_attn
