#include "short_path.hpp"

#include <cmath>
#include <optional>

#include "cutlass_attn.hpp"
#include "dlpack.hpp"
#include "errors.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

struct Torch {
  TorchFunctions functions;
  dlpack::ExchangeApi const* api;
  py::str requires_grad{"requires_grad"};
  py::tuple memory_format = py::make_tuple("memory_format");
};

py::object checked(PyObject* owned) {
  if (owned == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(owned);
}

bool is_true(py::object const& x) {
  int const value = PyObject_IsTrue(x.ptr());
  if (value < 0) throw py::error_already_set();
  return value != 0;
}

bool calls_are_intercepted(Torch const& torch) {
  PyObject* const functions = torch.functions.interceptors.ptr();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(functions); ++i) {
    if (is_true(checked(PyObject_CallNoArgs(PyTuple_GET_ITEM(functions, i))))) return true;
  }
  return false;
}

// False for a tensor without memory of its own, such as a sparse one or one that vmap() wraps.
bool read(Torch const& torch, PyObject* tensor, dlpack::Tensor& out) {
  if (torch.api->tensor_from_object(tensor, &out) == 0) return true;
  PyErr_Clear();
  return false;
}

std::optional<DType> dtype_of(dlpack::Tensor const& t) {
  if (t.dtype.lanes != 1) return {};
  if (t.dtype.code == dlpack::kFloat && t.dtype.bits == 16) return DType::kFloat16;
  if (t.dtype.code == dlpack::kBfloat && t.dtype.bits == 16) return DType::kBFloat16;
  if (t.dtype.code == dlpack::kFloat && t.dtype.bits == 32) return DType::kFloat32;
  return {};
}

TensorRef ref(dlpack::Tensor const& t, bool bshd) {
  return {static_cast<char*>(t.data) + t.byte_offset, t.strides[0], t.strides[bshd ? 2 : 1],
          t.strides[bshd ? 1 : 2]};
}

bool is_contiguous(dlpack::Tensor const& t) {
  int64_t expected = 1;
  for (int d = 3; d >= 0; --d) {
    if (t.shape[d] != 1 && t.strides[d] != expected) return false;
    expected *= t.shape[d];
  }
  return true;
}

// Operands and dimensions but for the result's address, if all is as it should be.
bool fill(AttnParams& p, dlpack::Tensor const& q, dlpack::Tensor const& k, dlpack::Tensor const& v,
          bool bshd) {
  std::optional<DType> const dtype = dtype_of(q);
  if (!dtype) return false;
  for (dlpack::Tensor const* t : {&q, &k, &v}) {
    if (t->ndim != 4 || dtype_of(*t) != dtype || t->device.type != q.device.type ||
        t->device.index != q.device.index || (t->strides[3] != 1 && t->shape[3] > 1)) {
      return false;
    }
    for (int d = 0; d < 4; ++d) {
      if (t->shape[d] > INT32_MAX) return false;
    }
  }
  int const head = bshd ? 2 : 1, row = bshd ? 1 : 2;
  // With V as wide as Q the result has the shape of Q.
  if (k.shape[0] != q.shape[0] || k.shape[3] != q.shape[3]) return false;
  for (int d = 0; d < 4; ++d) {
    if (v.shape[d] != k.shape[d]) return false;
  }
  p.dtype = *dtype;
  p.batch = int32_t(q.shape[0]);
  p.num_heads_q = int32_t(q.shape[head]);
  p.num_heads_kv = int32_t(k.shape[head]);
  p.seqlen_q = int32_t(q.shape[row]);
  p.seqlen_k = int32_t(k.shape[row]);
  p.head_dim = p.head_dim_v = int32_t(q.shape[3]);
  p.q = ref(q, bshd);
  p.k = ref(k, bshd);
  p.v = ref(v, bshd);
  return true;
}

// Scalar options, if they are of their usual types and values.
bool fill_options(AttnParams& p, PyObject* causal, PyObject* scale, PyObject* softcap) {
  if (!PyBool_Check(causal) || !PyFloat_CheckExact(softcap)) return false;
  if (scale != Py_None && !PyFloat_CheckExact(scale)) return false;
  p.causal = causal == Py_True;
  p.softcap = float(PyFloat_AS_DOUBLE(softcap));
  if (scale != Py_None) {
    p.softmax_scale = float(PyFloat_AS_DOUBLE(scale));
  } else if (p.head_dim > 0) {
    p.softmax_scale = float(1.0 / std::sqrt(double(p.head_dim)));
  }
  return true;
}

bool needs_grad(Torch const& torch, PyObject* const* tensors) {
  if (!is_true(checked(PyObject_CallNoArgs(torch.functions.is_grad_enabled.ptr())))) return false;
  for (int i = 0; i < 3; ++i) {
    if (is_true(checked(PyObject_GetAttr(tensors[i], torch.requires_grad.ptr())))) return true;
  }
  return false;
}

py::object empty_like(Torch const& torch, PyObject* q, dlpack::Tensor const& described) {
  PyObject* const function = torch.functions.empty_like.ptr();
  if (is_contiguous(described)) return checked(PyObject_CallOneArg(function, q));
  PyObject* const args[] = {q, torch.functions.contiguous_format.ptr()};
  return checked(PyObject_Vectorcall(function, args, 1, torch.memory_format.ptr()));
}

py::object attention(Torch const& torch, PyObject* const* args) {
  for (int i = 0; i < 3; ++i) {
    if (Py_TYPE(args[i]) != reinterpret_cast<PyTypeObject*>(torch.functions.tensor.ptr())) {
      return py::none();  // FakeTensor and other subclasses
    }
  }
  if (calls_are_intercepted(torch)) return py::none();
  dlpack::Tensor q, k, v, out;
  if (!read(torch, args[0], q) || !read(torch, args[1], k) || !read(torch, args[2], v)) {
    return py::none();
  }
  if (!PyUnicode_Check(args[6])) return py::none();
  bool const bshd = PyUnicode_CompareWithASCIIString(args[6], "bshd") == 0;
  if (!bshd && PyUnicode_CompareWithASCIIString(args[6], "bhsd") != 0) return py::none();
  AttnParams params;
  if (!fill(params, q, k, v, bshd) || !fill_options(params, args[3], args[4], args[5])) {
    return py::none();
  }
  if (needs_grad(torch, args)) return py::none();
  for (int i = 0; i < 3; ++i) {
    if (is_true(checked(PyObject_CallOneArg(torch.functions.is_neg.ptr(), args[i])))) {
      return py::none();  // its memory holds the opposite values
    }
  }

  LaunchOptions options;
  if (q.device.type == dlpack::kCuda) {
    options.device = Device::kCuda;
    options.device_index = q.device.index;
    if (torch.api->current_work_stream(q.device.type, q.device.index, &options.stream) != 0) {
      throw py::error_already_set();
    }
  } else if (q.device.type == dlpack::kCpu) {
    py::object const threads = checked(PyObject_CallNoArgs(torch.functions.num_threads.ptr()));
    options.num_threads = threads.cast<int>();
  } else {
    return py::none();
  }

  py::object result = empty_like(torch, args[0], q);
  if (torch.api->tensor_from_object(result.ptr(), &out) != 0) throw py::error_already_set();
  params.o = ref(out, bshd);
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = attention_forward(params, options);
  }
  raise_unless_ok(status);
  return result;
}

PyObject* entry(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  auto* const torch = static_cast<Torch*>(PyCapsule_GetPointer(self, nullptr));
  if (torch == nullptr) return nullptr;
  if (count != 7) {
    PyErr_Format(PyExc_TypeError, "the short path takes 7 arguments, got %zd", count);
    return nullptr;
  }
  try {
    return attention(*torch, args).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

}  // namespace

py::object make_short_path(TorchFunctions functions) {
  // Not through pybind11, whose dispatcher of arguments takes as long as all of the checks here.
  static PyMethodDef method = {"short_path",
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry)),
                               METH_FASTCALL, "See short_path.hpp."};
  auto const* api = static_cast<dlpack::ExchangeApi const*>(
      PyCapsule_GetPointer(functions.exchange_api.ptr(), dlpack::kCapsuleName));
  if (api == nullptr) throw py::error_already_set();
  while (api != nullptr && api->version.major != dlpack::kMajorVersion) api = api->older;
  if (api == nullptr || api->tensor_from_object == nullptr) {
    return py::cpp_function([](py::args const&) { return py::none(); });
  }
  py::capsule const self(new Torch{std::move(functions), api},
                         [](void* torch) { delete static_cast<Torch*>(torch); });
  return checked(PyCFunction_New(&method, self.ptr()));
}

}  // namespace cutlass_attn
