#include "arrays.hpp"

#include <algorithm>
#include <string>

#include "errors.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

// Set once, never freed.
Library const* g_torch = nullptr;
Library const* g_numpy = nullptr;

}  // namespace

py::tuple tuple_of(Shape const& shape) {
  py::tuple sizes(shape.ndim);
  for (int d = 0; d < shape.ndim; ++d) sizes[size_t(d)] = shape.sizes[d];
  return sizes;
}

py::object checked(PyObject* owned) {
  if (owned == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(owned);
}

bool View::is_contiguous() const {
  if (std::count(shape, shape + ndim, 0) > 0) return true;
  int64_t expected = 1;
  for (int d = ndim - 1; d >= 0; --d) {
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

Library::Library(py::module_ module)
    : module_(std::move(module)),
      type_(reinterpret_cast<PyTypeObject*>(py::object(module_.attr("ARRAY")).ptr())) {
  if (!PyType_Check(type_)) raise(PyExc_TypeError, "ARRAY must be the type of arrays");
}

py::object Library::empty(View const& x, Shape const& shape) const {
  return module_.attr("empty")(py::handle(x.object), tuple_of(shape));
}

py::object Library::largest_per_head(PyObject* x) const {
  return module_.attr("largest_per_head")(py::handle(x));
}

py::object Library::empty_lse(View const& x, Shape const& shape) const {
  return module_.attr("empty_lse")(py::handle(x.object), tuple_of(shape));
}

py::object Library::empty_like(PyObject* x) const {
  return module_.attr("empty_like")(py::handle(x));
}

py::object Library::zeros_like(PyObject* x) const {
  return module_.attr("zeros_like")(py::handle(x));
}

py::object Library::contiguous(PyObject* x) const {
  return module_.attr("contiguous")(py::handle(x));
}

py::object Library::copy(PyObject* x) const { return module_.attr("copy")(py::handle(x)); }

py::object Library::zeros(View const& x, Shape const& shape) const {
  return module_.attr("zeros")(py::handle(x.object), tuple_of(shape));
}

py::object Library::filled(View const& x, char const* dtype, Shape const& shape,
                           double value) const {
  return module_.attr("filled")(py::handle(x.object), dtype, tuple_of(shape), value);
}

py::object Library::scratch(View const& x, char const* dtype, Shape const& shape) const {
  return module_.attr("scratch")(py::handle(x.object), dtype, tuple_of(shape));
}

py::object Library::random_state(View const& x) const {
  return module_.attr("random_state")(py::handle(x.object));
}

Library const& library_of(PyObject* q, PyObject* k, PyObject* v) {
  for (Library const* library : {g_torch, g_numpy}) {
    if (library && library->has(q) && library->has(k) && library->has(v)) return *library;
  }
  std::string kinds;
  for (PyObject* x : {q, k, v}) kinds += (kinds.empty() ? "" : ", ") + type_name(x);
  raise(PyExc_TypeError, "q, k and v must all be torch tensors or all numpy arrays, got " + kinds);
}

void define_libraries(py::module_& m) {
  m.def("register_torch", [](py::module_ module) { g_torch = make_torch(std::move(module)); });
  m.def("register_numpy", [](py::module_ module) { g_numpy = make_numpy(std::move(module)); });
}

}  // namespace cutlass_attn
