#include "merge_call.hpp"

#include <algorithm>

#include "arrays.hpp"
#include "entry.hpp"
#include "errors.hpp"
#include "parse.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

// A log-sum-exp: (batch, heads, rows), or (heads, rows) if packed.
PerRow per_row(View const& x) {
  int const first = x.ndim - 2;
  return {static_cast<float*>(x.data), first == 0 ? 0 : x.strides[0], x.strides[first],
          x.strides[first + 1]};
}

py::object merge(PyObject* const* args, Py_ssize_t count, PyObject*) {
  if (count != 4) raise(PyExc_TypeError, "merge() takes o_a, lse_a, o_b and lse_b");
  Library const& library = library_of(args[0], args[1], args[2]);
  Arrays arrays;
  for (int i = 0; i < 4; ++i) arrays.add(args[i]);
  if (library.must_see(arrays) || library.needs_gradient(arrays)) return py::none();
  View const a = library.read(args[0], true), lse_a = library.read(args[1], true);
  View const b = library.read(args[2], true), lse_b = library.read(args[3], true);
  DType dtype;
  bool is_taken = get_dtype(a, dtype) && dtype != DType::kFloat64;
  for (View const* x : {&a, &b}) {
    int const last = x->ndim - 1;
    is_taken &= x->shape[last] <= kMaxHeadDim && (x->strides[last] == 1 || x->shape[last] <= 1);
  }
  try {
    require_memory("o_a", a);
    require_memory("lse_a", lse_a);
    require_memory("o_b", b);
    require_memory("lse_b", lse_b);
  } catch (NoMemory const&) {
    return py::none();
  }
  for (View const* x : {&a, &b, &lse_a, &lse_b}) {
    is_taken &= x->is_aligned && x->device == a.device && x->device.type != dlpack::kOtherDevice;
  }
  if (!is_taken || a.shape[a.ndim - 1] == 0) return py::none();

  Shape shape({1, 1, 1, 1}), lse_shape({1, 1, 1});
  shape.ndim = a.ndim;
  lse_shape.ndim = lse_a.ndim;
  std::copy(a.shape, a.shape + a.ndim, shape.sizes);
  std::copy(lse_a.shape, lse_a.shape + lse_a.ndim, lse_shape.sizes);
  py::object const o = library.empty(a, shape), lse = library.empty_lse(a, lse_shape);
  int const first = a.ndim - 3;  // after the batch
  MergeProblem p;
  p.a = operand("o_a", a, true, dtype);
  p.b = operand("o_b", b, true, dtype);
  p.o = operand("o", library.read(o.ptr(), true), true, dtype);
  p.lse_a = per_row(lse_a);
  p.lse_b = per_row(lse_b);
  p.lse = per_row(library.read(lse.ptr(), true));
  p.batch = first == 0 ? 1 : size("the batch", a.shape[0]);
  p.seqlen = size("the number of rows", a.shape[first]);
  p.num_heads = size("the number of heads", a.shape[first + 1]);
  p.head_dim = size("the head dim", a.shape[first + 2]);
  LaunchOptions options;
  options.device = a.device.type == dlpack::kCuda ? Device::kCuda : Device::kCpu;
  options.device_index = a.device.index;
  library.place(a.device, options);
  Status status;
  {
    py::gil_scoped_release unlocked;
    status = merge_states(p, options);
  }
  raise_unless_ok(status);
  return py::make_tuple(o, lse);
}

}  // namespace

void define_merge_call(py::module_& m) {
  static PyMethodDef methods[] = {
      method<merge>("merge", "Runs merge_states()'s kernel, or returns None."),
      {},
  };
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace cutlass_attn
