// torch tensors. docs/notes/host-time.md has the host time of each part of a call.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "arrays.hpp"
#include "errors.hpp"
#include "parse.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

// Dtypes that a call may have, by torch's names without "torch."; all others are kOther.
dlpack::DataType dtype_of(std::string const& name) {
  static constexpr std::pair<char const*, dlpack::DataType> kTypes[] = {
      {"float16", {dlpack::kFloat, 16, 1}}, {"bfloat16", {dlpack::kBfloat, 16, 1}},
      {"float32", {dlpack::kFloat, 32, 1}}, {"float64", {dlpack::kFloat, 64, 1}},
      {"bool", {dlpack::kBool, 8, 1}},      {"int64", {dlpack::kInt, 64, 1}},
      {"uint64", {dlpack::kUInt, 64, 1}},   {"int32", {dlpack::kInt, 32, 1}},
      {"float8_e4m3fn", kFloat8E4M3},       {"uint8", kUInt8}};
  for (auto const& [known, type] : kTypes) {
    if (name == std::string("torch.") + known) return type;
  }
  return {dlpack::kOther, 0, 1};
}

dlpack::Device device_of(py::handle device) {
  std::string const type = py::str(device.attr("type"));
  py::object const index = device.attr("index");
  if (type == "cpu") return {dlpack::kCpu, 0};
  if (type == "cuda") return {dlpack::kCuda, index.is_none() ? 0 : index.cast<int32_t>()};
  return {dlpack::kOtherDevice, 0};
}

class Torch final : public Library {
 public:
  explicit Torch(py::module_ module)
      : Library(std::move(module)),
        tensor_(module_.attr("ARRAY")),
        strided_(module_.attr("strided")),
        interceptors_(module_.attr("INTERCEPTORS")),
        forward_ad_(module_.attr("forward_ad")),
        empty_like_(module_.attr("empty_like")),
        empty_like_contiguous_(module_.attr("empty_like_contiguous")),
        is_neg_(module_.attr("is_neg")),
        is_grad_enabled_(module_.attr("is_grad_enabled")),
        is_autocast_(module_.attr("is_autocast_enabled")),
        is_inference_(module_.attr("is_inference")),
        is_inference_mode_(module_.attr("is_inference_mode_enabled")),
        is_zeros_(module_.attr("is_zerotensor")),
        increment_version_(module_.attr("increment_version")),
        num_threads_(module_.attr("num_threads")),
        current_stream_(module_.attr("current_stream")),
        keeps_masks_(module_.attr("KEEPS_MASKS").cast<bool>()) {
    py::object const capsule = module_.attr("exchange_api");
    if (capsule.is_none()) return;
    api_ = static_cast<dlpack::ExchangeApi const*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
    if (api_ == nullptr) throw py::error_already_set();
    while (api_ != nullptr && api_->version.major != dlpack::kMajorVersion) api_ = api_->older;
    if (api_ != nullptr && api_->tensor_from_object == nullptr) api_ = nullptr;
  }

  View read(PyObject* x, bool memory) const override {
    if (memory && api_ != nullptr && is_plain(x)) {
      dlpack::Tensor t;
      if (api_->tensor_from_object(x, &t) != 0) {
        PyErr_Clear();  // a tensor without memory
      } else if (t.device.type == dlpack::kCpu || t.device.type == dlpack::kCuda) {
        return view_of(x, t);
      }
    }
    return read_attributes(x, memory);
  }

  bool must_see(Arrays const& arrays) const override {
    for (PyObject* x : arrays) {
      if (!is_plain(x)) return true;  // FakeTensor and other subclasses
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(interceptors_.ptr()); ++i) {
      if (says(PyObject_CallNoArgs(PyTuple_GET_ITEM(interceptors_.ptr(), i)))) return true;
    }
    py::object const level = checked(PyObject_GetAttr(forward_ad_.ptr(), current_level_.ptr()));
    if (PyLong_AsLong(level.ptr()) >= 0) return true;
    // A lazily negated view: its memory holds the values with the opposite sign.
    return arrays.any_of_numbers(
        [&](PyObject* x) { return says(PyObject_CallOneArg(is_neg_.ptr(), x)); });
  }

  bool share_storage(PyObject* x, PyObject* y) const override {
    auto const place = [](py::handle tensor) {
      return py::make_tuple(tensor.attr("untyped_storage")().attr("_cdata"),
                            tensor.attr("storage_offset")());
    };
    return place(x).equal(place(y));
  }

  // Outside of inference mode torch forbids writes to its tensors.
  bool is_frozen(PyObject* x) const override {
    return says(PyObject_CallOneArg(is_inference_.ptr(), x)) &&
           !says(PyObject_CallNoArgs(is_inference_mode_.ptr()));
  }

  void count_write(PyObject* x) const override {
    checked(PyObject_CallOneArg(increment_version_.ptr(), x));
  }

  // Tensors of inference mode have no counter. A view has that of its base.
  py::object counted(PyObject* x, int64_t& writes) const override {
    if (!keeps_masks_ || !is_plain(x)) return {};
    PyObject* const count = PyObject_GetAttr(x, version_.ptr());
    if (count == nullptr) {
      PyErr_Clear();
      return {};
    }
    writes = checked(count).cast<int64_t>();
    py::object base = checked(PyObject_GetAttr(x, base_.ptr()));
    return base.is_none() ? py::reinterpret_borrow<py::object>(x) : base;
  }

  bool records() const override { return says(PyObject_CallNoArgs(is_grad_enabled_.ptr())); }

  bool needs_gradient(Arrays const& arrays) const override {
    return records() && arrays.any_of_numbers([&](PyObject* x) {
      return says(PyObject_GetAttr(x, requires_grad_.ptr()));
    });
  }

  bool casts() const override { return says(PyObject_CallNoArgs(is_autocast_.ptr())); }

  py::object empty(View const& x, Shape const& shape) const override {
    // Takes half as long as torch.empty().
    if (!shape.is_of(x)) return Library::empty(x, shape);
    py::object const& function = x.is_contiguous() ? empty_like_ : empty_like_contiguous_;
    return checked(PyObject_CallOneArg(function.ptr(), x.object));
  }

  py::object empty_like(PyObject* x) const override {
    return checked(PyObject_CallOneArg(empty_like_.ptr(), x));
  }

  py::object empty_lse(View const& x, Shape const& shape) const override {
    return by_template(lse_templates_, x, x.dtype == kFloat64 ? "float64" : "float32", shape);
  }

  py::object workspace(View const& x, int64_t bytes) const override {
    return by_template(workspace_templates_, x, "uint8", {bytes});
  }

  void place(dlpack::Device device, RunOptions& options) const override {
    if (device.type == dlpack::kCpu) {
      options.num_threads = checked(PyObject_CallNoArgs(num_threads_.ptr())).cast<int>();
    } else if (api_ == nullptr) {
      options.stream = reinterpret_cast<void*>(current_stream_(device.index).cast<uintptr_t>());
    } else if (api_->current_work_stream(device.type, device.index, &options.stream) != 0) {
      throw py::error_already_set();
    }
  }

 private:
  static bool says(PyObject* answer) {
    int const value = PyObject_IsTrue(checked(answer).ptr());
    if (value < 0) throw py::error_already_set();
    return value != 0;
  }

  // A tensor with elements but without an address is a fault. If its storage was freed, the address
  // is the offset of the first element; no process has memory below 64 KiB.
  void find_fault(View& view) const {
    constexpr uintptr_t kLowest = 1 << 16;
    if (reinterpret_cast<uintptr_t>(view.data) >= kLowest) return;
    int const dims = std::min(view.ndim, View::kMaxDims);
    if (std::count(view.shape, view.shape + dims, 0) > 0) return;
    view.is_lazy = says(PyObject_CallOneArg(is_zeros_.ptr(), view.object));
    view.fault = view.is_lazy ? "is an efficient zero tensor, which has no memory; call .clone() "
                                "first"
                              : "has elements but no memory: its storage was freed";
  }

  View view_of(PyObject* x, dlpack::Tensor const& t) const {
    View view;
    view.object = x;
    view.data = t.data ? static_cast<char*>(t.data) + t.byte_offset : nullptr;
    view.device = t.device;
    view.dtype = t.dtype;
    view.ndim = t.ndim;
    if (t.ndim <= View::kMaxDims) {
      std::copy(t.shape, t.shape + t.ndim, view.shape);
      std::copy(t.strides, t.strides + t.ndim, view.strides);
    }
    find_fault(view);
    return view;
  }

  // For tensors that the exchange table does not support: subclasses, tensors without memory, older
  // torch.
  View read_attributes(PyObject* x, bool memory) const {
    py::handle const tensor(x);
    if (tensor.attr("is_nested").cast<bool>()) {
      raise(PyExc_TypeError,
            "tensors must not be nested; allowed: q, k and v of attention() of layout torch.jagged "
            "(torch.nested.nested_tensor(..., layout=torch.jagged)), or .values() and .offsets() "
            "of one in attention_varlen()");
    }
    View view;
    view.object = x;
    view.device = device_of(tensor.attr("device"));
    view.dtype = dtype_of(py::str(tensor.attr("dtype")));
    py::object const layout = tensor.attr("layout");
    if (!layout.is(strided_)) {
      raise(PyExc_TypeError, "tensors must be dense, got one of layout " +
                                 std::string(py::str(layout)) + "; call .to_dense() first");
    }
    view.ndim = tensor.attr("dim")().cast<int>();
    for (int d = 0; d < view.ndim && view.ndim <= View::kMaxDims; ++d) {
      view.shape[d] = tensor.attr("size")(d).cast<int64_t>();
      view.strides[d] = tensor.attr("stride")(d).cast<int64_t>();
    }
    // A subclass with its own __torch_dispatch__, such as FakeTensor, need not have memory.
    bool const has_memory =
        tensor.attr("__torch_dispatch__").is(tensor_.attr("__torch_dispatch__"));
    if (memory && has_memory && view.device.type != dlpack::kOtherDevice) {
      try {
        view.data = reinterpret_cast<void*>(tensor.attr("data_ptr")().cast<uintptr_t>());
        find_fault(view);
      } catch (py::error_already_set const&) {  // a wrapper of a transform, which has no storage
        view.fault = "is a tensor without storage";
        view.is_lazy = true;
      }
    }
    return view;
  }

  // Templates: tensors with the memory of one element, for the most recent shapes. empty_like() of
  // a template takes half as long as torch.empty(). Making a template takes longer, so it is made
  // when a shape is used for the second time. Protected by the GIL.
  struct Template {
    dlpack::Device device{dlpack::kOtherDevice, 0};
    std::string_view dtype;
    Shape shape{};
    py::object tensor;

    bool is_for(View const& x, std::string_view type, Shape const& sizes) const {
      return device == x.device && dtype == type && shape == sizes;
    }
  };
  struct Templates {
    static constexpr int kCount = 8;
    Template known[kCount];
    int next = 0;
  };

  py::object by_template(Templates& templates, View const& x, char const* dtype,
                         Shape const& shape) const {
    for (Template& known : templates.known) {
      if (!known.is_for(x, dtype, shape)) continue;
      if (!known.tensor) {
        py::object made = module_.attr("template")(py::handle(x.object), dtype, tuple_of(shape));
        if (made.is_none()) return scratch(x, dtype, shape);
        known.tensor = std::move(made);
      }
      return checked(PyObject_CallOneArg(empty_like_contiguous_.ptr(), known.tensor.ptr()));
    }
    templates.known[templates.next] = {x.device, dtype, shape, {}};
    templates.next = (templates.next + 1) % Templates::kCount;
    return scratch(x, dtype, shape);
  }

  mutable Templates lse_templates_, workspace_templates_;

  dlpack::ExchangeApi const* api_ = nullptr;  // null for torch before 2.10
  py::object tensor_, strided_;
  py::tuple interceptors_;
  py::object forward_ad_;
  py::object empty_like_, empty_like_contiguous_, is_neg_, is_grad_enabled_, is_autocast_;
  py::object is_inference_, is_inference_mode_, is_zeros_, increment_version_;
  py::object num_threads_, current_stream_;
  bool keeps_masks_;
  py::str requires_grad_{"requires_grad"}, current_level_{"_current_level"};
  py::str version_{"_version"}, base_{"_base"};
};

}  // namespace

Library const* make_torch(py::module_ module) { return new Torch(std::move(module)); }

}  // namespace cutlass_attn
