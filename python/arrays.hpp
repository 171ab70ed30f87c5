// Arrays of torch and numpy. Neither library is linked: each is used through a Python module,
// cutlass_attn._call.torch_library or numpy_library.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "cutlass_attn.hpp"
#include "dlpack.hpp"

namespace cutlass_attn {

// One array: address, dtype, device, shape and strides.
struct View {
  static constexpr int kMaxDims = 4;

  PyObject* object = nullptr;  // borrowed
  void* data = nullptr;        // null: no elements, or no memory, as on torch's "meta" device
  dlpack::Device device = {dlpack::kCpu, 0};
  dlpack::DataType dtype = {dlpack::kOther, 0, 1};
  int ndim = 0;
  int64_t shape[kMaxDims] = {};  // shape and strides are unset for an array with more dimensions
  int64_t strides[kMaxDims] = {};
  bool is_writable = true;
  // Address and strides are multiples of the element size; otherwise strides are wrong.
  bool is_aligned = true;
  // Why the elements cannot be accessed, as text to follow the argument's name. Null: they can.
  char const* fault = nullptr;
  bool is_lazy = false;  // for a fault with which torch's operators can run the call

  bool is_contiguous() const;
};

// A shape of up to 4 dimensions.
struct Shape {
  int64_t sizes[View::kMaxDims];
  int ndim;

  Shape(std::initializer_list<int64_t> dims) : ndim(int(dims.size())) {
    std::copy(dims.begin(), dims.end(), sizes);
  }
  explicit Shape(View const& x) : ndim(x.ndim) { std::copy_n(x.shape, ndim, sizes); }
  int64_t const* begin() const { return sizes; }
  int64_t const* end() const { return sizes + ndim; }
  bool is_of(View const& x) const { return std::equal(begin(), end(), x.shape, x.shape + x.ndim); }
  bool operator==(Shape const& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }
};

pybind11::tuple tuple_of(Shape const& shape);

// The arrays passed to a call, borrowed: q, k and v, then options and the result.
struct Arrays {
  static constexpr int kMax = 24;
  PyObject* items[kMax];
  bool is_integer[kMax];  // by argument: integers have neither a lazy sign bit nor a gradient
  int count = 0;

  void add(PyObject* x, bool integer = false) {
    is_integer[count] = integer;
    items[count++] = x;
  }
  // Calls visit(x) for the arrays that may be of floating point, until one call returns true.
  template <class Visit>
  bool any_of_numbers(Visit&& visit) const {
    for (int i = 0; i < count; ++i) {
      if (!is_integer[i] && visit(items[i])) return true;
    }
    return false;
  }
  PyObject* const* begin() const { return items; }
  PyObject* const* end() const { return items + count; }
};

// The functions of an array library that this module calls.
class Library {
 public:
  virtual ~Library() = default;

  bool has(PyObject* x) const { return PyObject_TypeCheck(x, type_); }

  // Reads metadata only. Without `memory` the address stays null, because the array may have none.
  virtual View read(PyObject* x, bool memory) const = 0;

  // Whether the library must see the call before memory is touched (dispatch modes, tracing).
  virtual bool must_see(Arrays const& arrays) const = 0;

  // Whether writing to the array is forbidden. count_write() reports a write to the library.
  virtual bool is_frozen(PyObject*) const { return false; }
  // Whether two arrays without memory begin at one element of one storage.
  virtual bool share_storage(PyObject*, PyObject*) const { return false; }
  virtual void count_write(PyObject*) const {}

  // The array that owns the memory of `x`, if the library counts the writes to it, and their number
  // so far. Null: nobody knows of writes.
  virtual pybind11::object counted(PyObject*, int64_t& /*writes*/) const { return {}; }

  // Whether gradients are being recorded, whether one of these arrays needs a gradient, and whether
  // arguments are cast, as under torch.autocast.
  virtual bool records() const { return false; }
  virtual bool needs_gradient(Arrays const&) const { return false; }
  virtual bool casts() const { return false; }

  // A contiguous array of this shape, with the dtype and device of `x`.
  virtual pybind11::object empty(View const& x, Shape const& shape) const;
  virtual pybind11::object empty_lse(View const& x, Shape const& shape) const;

  // An array with the shape of `x`, for a gradient; and `x` itself if contiguous, else a copy.
  virtual pybind11::object empty_like(PyObject* x) const;
  pybind11::object zeros_like(PyObject* x) const;
  pybind11::object contiguous(PyObject* x) const;
  pybind11::object copy(PyObject* x) const;  // contiguous

  // zeros(): like empty(), filled with zeros. filled(), scratch(): arrays with the dtype of this
  // name on the device of `x`, filled with `value`, or uninitialised.
  pybind11::object zeros(View const& x, Shape const& shape) const;
  pybind11::object filled(View const& x, char const* dtype, Shape const& shape, double value) const;
  pybind11::object scratch(View const& x, char const* dtype, Shape const& shape) const;

  // Maximum over all dimensions but that of the heads of an array in the LSE's layout.
  pybind11::object largest_per_head(PyObject* x) const;

  // Uninitialised memory for the kernels of a call.
  virtual pybind11::object workspace(View const& x, int64_t bytes) const {
    return scratch(x, "uint8", {bytes});
  }

  // Seed and offset for dropout, on the device of x.
  pybind11::object random_state(View const& x) const;

  // Sets stream or threads for a call whose operands are on this device, a CPU or a GPU.
  virtual void place(dlpack::Device device, RunOptions& options) const = 0;

 protected:
  // `module` has ARRAY, the type of arrays, and functions with the names of those above that make
  // or convert arrays.
  explicit Library(pybind11::module_ module);

  // Whether `x` is exactly of this type, not of a subclass.
  bool is_plain(PyObject* x) const { return Py_TYPE(x) == type_; }

  pybind11::module_ module_;

 private:
  PyTypeObject* type_;
};

// The library of q, k and v. Raises TypeError unless all three belong to one library.
Library const& library_of(PyObject* q, PyObject* k, PyObject* v);

// Defines _C.register_torch(module) and _C.register_numpy(module).
void define_libraries(pybind11::module_& m);

Library const* make_torch(pybind11::module_ module);
Library const* make_numpy(pybind11::module_ module);

// Takes a new reference; throws the Python exception if it is null.
pybind11::object checked(PyObject* owned);

}  // namespace cutlass_attn
