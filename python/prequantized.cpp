#include "prequantized.hpp"

#include <memory>
#include <string>
#include <utility>

#include "call.hpp"
#include "entry.hpp"
#include "errors.hpp"
#include "parse.hpp"
#include "prequantize.hpp"
#include "runtime/options.hpp"

namespace cutlass_attn {
namespace {

struct PrequantizedObject {
  PyObject_HEAD Prequantized* value;
};
PyTypeObject* g_type = nullptr;  // of PrequantizedKV; never freed

Prequantized const& value_of(PyObject* x) {
  return *reinterpret_cast<PrequantizedObject*>(x)->value;
}

py::object version_of(py::object const& x) {
  PyObject* const version = PyObject_GetAttrString(x.ptr(), "_version");
  if (version != nullptr) return py::object::steal(version);
  PyErr_Clear();  // of numpy, and of inference mode
  return py::none();
}

// Dimensions in order of memory. A dimension of size 0 or 1 may have any stride.
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
  return PyObject_TypeCheck(quantize, g_type) ? &value_of(quantize) : nullptr;
}

namespace {

py::object prequantize_call(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Arguments const given(kAttention, "prequantize", args, count, names);
  quantize_of(given.quantize);  // None and what is quantized already are refused here
  Call call(given);
  if (call.library->must_see(call.arrays)) {
    raise(PyExc_ValueError,
          attribute(py::import("cutlass_attn._call.torch_library").ptr(), "NO_PREQUANTIZED"));
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
  made->k = py::borrow(given.k);
  made->v = py::borrow(given.v);
  made->versions[0] = version_of(made->k);
  made->versions[1] = version_of(made->v);
  made->memory = py::none();
  made->problem = call.problem;
  call.assume_memory(given);
  LaunchOptions const options = call.place();
  Status status;
  {
    py::release_gil unlocked;
    status = prequantize(call.problem, options);
  }
  raise_unless_ok(status);
  if (!call.held.empty()) {
    made->memory = call.held.back();
    View const bytes = call.library->read(made->memory.ptr(), true);
    made->workspace = {bytes.data, bytes.shape[0]};
  }
  py::object result = checked(PyType_GenericAlloc(g_type, 0));
  reinterpret_cast<PrequantizedObject*>(result.ptr())->value = made.release();
  return result;
}

// --- The type PrequantizedKV ---------------------------------------------------------------------

void destroy(PyObject* x) {
  PyTypeObject* const type = Py_TYPE(x);
  delete reinterpret_cast<PrequantizedObject*>(x)->value;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(x);
  Py_DECREF(type);
}

PyObject* refuse_new(PyTypeObject*, PyObject*, PyObject*) {
  PyErr_SetString(PyExc_TypeError, "a PrequantizedKV is made by cutlass_attn.prequantize()");
  return nullptr;
}

PyObject* get_k(PyObject* x, void*) { return py::object(value_of(x).k).release(); }
PyObject* get_v(PyObject* x, void*) { return py::object(value_of(x).v).release(); }
PyObject* get_quantize(PyObject* x, void*) {
  return PyUnicode_FromString(name_of(value_of(x).problem.quantize));
}
PyObject* get_nbytes(PyObject* x, void*) {
  return PyLong_FromLongLong(value_of(x).workspace.bytes);
}

PyObject* text_of(PyObject* object) {
  try {
    Prequantized const& x = value_of(object);
    std::string const text = std::string("PrequantizedKV(\"") + name_of(x.problem.quantize) +
                             "\", k " + shape_of(x.k.ptr()) + ", v " + shape_of(x.v.ptr()) + ", " +
                             std::to_string(x.workspace.bytes) + " bytes)";
    return py::to_python(text).release();
  } catch (py::Error const&) {
    return nullptr;
  }
}

PyTypeObject* make_type() {
  static PyGetSetDef fields[] = {
      {"k", &get_k, nullptr, nullptr, nullptr},
      {"v", &get_v, nullptr, nullptr, nullptr},
      {"quantize", &get_quantize, nullptr, nullptr, nullptr},
      {"nbytes", &get_nbytes, nullptr, nullptr, nullptr},
      {},
  };
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("K and V rounded to 8 bits, by `prequantize`: the `quantize` "
                                    "of calls.")},
      {Py_tp_new, reinterpret_cast<void*>(&refuse_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
      {Py_tp_repr, reinterpret_cast<void*>(&text_of)},
      {Py_tp_getset, fields},
      {},
  };
  static PyType_Spec spec = {"cutlass_attn._C.PrequantizedKV", sizeof(PrequantizedObject), 0,
                             Py_TPFLAGS_DEFAULT, slots};
  return reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)).release());
}

}  // namespace

void define_prequantized(py::handle m) {
  g_type = make_type();
  auto* const type = reinterpret_cast<PyObject*>(g_type);
  py::check(PyModule_AddObjectRef(m.ptr(), "PrequantizedKV", type) == 0);
  static PyMethodDef methods[] = {
      method<prequantize_call>("prequantize", "Makes a PrequantizedKV."),
      {},
  };
  py::check(PyModule_AddFunctions(m.ptr(), methods) == 0);
}

}  // namespace cutlass_attn
