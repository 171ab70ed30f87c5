// numpy arrays, read by numpy's own C interface: DLPack has no read-only arrays, no other byte
// orders (which messages name) and no bfloat16 of ml_dtypes.
#include <algorithm>
#include <string>
#include <utility>

#include "arrays.hpp"
#include "parse.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

// The target of the capsule in an array's __array_struct__ (numpy.org: The array interface).
struct ArrayStruct {
  int two;  // the number 2
  int ndim;
  char kind;
  int item_bytes;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // in bytes
  void* data;
  PyObject* descr;
};
enum Flag { kAligned = 0x100, kNativeOrder = 0x200, kWriteable = 0x400 };

dlpack::DataType dtype_of(PyObject* x, ArrayStruct const& array) {
  auto const bits = uint8_t(8 * array.item_bytes);
  if (!(array.flags & kNativeOrder) || array.item_bytes > 8) return {dlpack::kOther, 0, 1};
  switch (array.kind) {
    case 'b':
      return {dlpack::kBool, bits, 1};
    case 'i':
      return {dlpack::kInt, bits, 1};
    case 'u':
      return {dlpack::kUInt, bits, 1};
    case 'f':
      return {dlpack::kFloat, bits, 1};
  }
  // numpy reports the dtypes of ml_dtypes as records.
  std::string const name = py::str(py::handle(x).attr("dtype").attr("name"));
  if (array.kind == 'V' && name == "bfloat16") return {dlpack::kBfloat, bits, 1};
  if (array.kind == 'V' && name == "float8_e4m3fn") return kFloat8E4M3;
  return {dlpack::kOther, 0, 1};
}

class Numpy final : public Library {
 public:
  explicit Numpy(py::module_ module)
      : Library(std::move(module)), is_masked_(module_.attr("is_masked")) {}

  View read(PyObject* x, bool) const override {
    py::capsule const capsule = py::handle(x).attr("__array_struct__");
    auto const& array =
        *static_cast<ArrayStruct const*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
    View view;
    view.object = x;
    view.data = array.data;
    view.dtype = dtype_of(x, array);
    view.ndim = array.ndim;
    view.is_writable = (array.flags & kWriteable) != 0;
    view.is_aligned = (array.flags & kAligned) != 0;
    if (!is_plain(x) && is_masked_(py::handle(x)).cast<bool>()) {
      view.fault =
          "is a masked array with masked entries; allowed: no masked entries, so call .filled() "
          "first";
    }
    Py_ssize_t const item = std::max(array.item_bytes, 1);
    for (int d = 0; d < view.ndim && view.ndim <= View::kMaxDims; ++d) {
      view.shape[d] = array.shape[d];
      view.is_aligned &= array.strides[d] % item == 0;
      view.strides[d] = array.strides[d] / item;
    }
    return view;
  }

  bool must_see(Arrays const&) const override { return false; }

  void place(dlpack::Device, RunOptions&) const override {}  // runs on threads of all cores

 private:
  py::object is_masked_;
};

}  // namespace

Library const* make_numpy(py::module_ module) { return new Numpy(std::move(module)); }

}  // namespace cutlass_attn
