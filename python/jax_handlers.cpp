#include "jax_handlers.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "cutlass_attn.hpp"
#include "xla_ffi.hpp"

namespace py = pybind11;

namespace cutlass_attn {
namespace {

using xla::CallFrame;

xla::Error* error(CallFrame const& frame, xla::ErrorCode code, std::string const& message) {
  xla::CreateError args{sizeof(args), nullptr, message.c_str(), code};
  return frame.api->create_error(&args);
}

xla::Error* error(CallFrame const& frame, Status const& status) {
  if (status.ok()) return nullptr;
  xla::ErrorCode const code =
      status.code == StatusCode::kInvalidArgument ? xla::ErrorCode::kInvalidArgument
      : status.code == StatusCode::kNoKernel      ? xla::ErrorCode::kUnimplemented
                                                  : xla::ErrorCode::kInternal;
  return error(frame, code, "cutlass_attn: " + status.message);
}

// An attribute that cutlass_attn.jax always sets.
template <class T>
T attribute(CallFrame const& frame, char const* name) {
  xla::Attributes const& all = frame.attributes;
  for (int64_t i = 0; i < all.count; ++i) {
    xla::Text const& text = *all.names[i];
    if (all.types[i] != xla::kScalar || text.length != std::strlen(name)) continue;
    if (std::memcmp(text.data, name, text.length) != 0) continue;
    T value;
    std::memcpy(&value, all.items[i]->value, sizeof(T));
    return value;
  }
  throw Status::invalid(std::string("attribute ") + name + " is missing");
}

DType dtype_of(xla::Buffer const& x) {
  switch (x.dtype) {
    case xla::DataType::kF16:
      return DType::kFloat16;
    case xla::DataType::kBF16:
      return DType::kBFloat16;
    case xla::DataType::kF32:
      return DType::kFloat32;
    default:
      throw Status::invalid("q must be float16, bfloat16 or float32");
  }
}

// Sizes (batch, heads, rows, columns) of a dense array. All dimensions before the last three are
// the batch; vmap adds some.
struct Sizes {
  int32_t batch = 1, heads = 0, rows = 0, columns = 0;

  Sizes(xla::Buffer const& x, bool bshd) {
    int64_t const* const last = x.dims + x.rank - 3;
    int64_t product = 1;
    for (int64_t const* dim = x.dims; dim != last; ++dim) product *= *dim;
    batch = int32_t(product);
    heads = int32_t(last[bshd ? 1 : 0]);
    rows = int32_t(last[bshd ? 0 : 1]);
    columns = int32_t(last[2]);
  }
};

Operand operand(xla::Buffer const& x, bool bshd) {
  Sizes const n(x, bshd);
  Operand dense{x.data};
  dense.batch_stride = int64_t(n.heads) * n.rows * n.columns;
  dense.head_stride = int64_t(bshd ? 1 : n.rows) * n.columns;
  dense.row_stride = int64_t(bshd ? n.heads : 1) * n.columns;
  dense.dtype = dtype_of(x);
  return dense;
}

Problem problem_of(CallFrame const& frame, bool bshd) {
  xla::Buffer* const* const args = frame.arguments.items;
  Sizes const q(*args[0], bshd), k(*args[1], bshd), v(*args[2], bshd);
  Problem p;
  p.q = operand(*args[0], bshd);
  p.k = operand(*args[1], bshd);
  p.v = operand(*args[2], bshd);
  p.batch = q.batch;
  p.num_heads_q = q.heads;
  p.num_heads_kv = k.heads;
  p.head_dim = q.columns;
  p.head_dim_v = v.columns;
  p.seq_q.seqlen = q.rows;
  p.seq_k.seqlen = k.rows;
  p.logits.softmax_scale = attribute<float>(frame, "softmax_scale");
  p.logits.softcap = attribute<float>(frame, "softcap");
  p.mask.causal = attribute<bool>(frame, "causal");
  p.mask.window_left = attribute<int32_t>(frame, "window_left");
  p.mask.window_right = attribute<int32_t>(frame, "window_right");
  p.mask.attention_chunk = attribute<int32_t>(frame, "attention_chunk");
  return p;
}

// Scratch memory of XLA. Once the call is enqueued, XLA reuses it for later work on the stream.
class Scratch {
 public:
  explicit Scratch(CallFrame const& frame) : frame_(frame) {}
  Scratch(Scratch const&) = delete;
  ~Scratch() {
    for (xla::FreeMemory& block : blocks_) ignore(frame_.api->free_memory(&block));
  }

  Workspace allocate(int64_t bytes) {
    xla::AllocateMemory args{
        sizeof(args), nullptr, frame_.context, size_t(bytes), size_t(kWorkspaceAlignment), nullptr};
    if (xla::Error* const failed = frame_.api->allocate_memory(&args)) {
      ignore(failed);
      throw std::bad_alloc();
    }
    blocks_.push_back({sizeof(xla::FreeMemory), nullptr, frame_.context, args.bytes, args.data});
    return {args.data, bytes};
  }

 private:
  void ignore(xla::Error* failed) {
    if (failed == nullptr) return;
    xla::DestroyError args{sizeof(args), nullptr, failed};
    frame_.api->destroy_error(&args);
  }

  CallFrame const& frame_;
  std::vector<xla::FreeMemory> blocks_;
};

LaunchOptions place(CallFrame const& frame, Device device, Scratch& scratch) {
  LaunchOptions options;
  options.device = device;
  if (device == Device::kCpu) return options;
  xla::GetStream stream{sizeof(stream), nullptr, frame.context, nullptr};
  xla::GetDevice ordinal{sizeof(ordinal), nullptr, frame.context, 0};
  if (frame.api->get_stream(&stream) || frame.api->get_device(&ordinal)) {
    throw Status::device_error("XLA did not report the stream and device to run on");
  }
  options.stream = stream.stream;
  options.device_index = ordinal.ordinal;
  options.allocate = [&scratch](int64_t bytes) { return scratch.allocate(bytes); };
  return options;
}

Status forward(CallFrame const& frame, Device device) {
  bool const bshd = attribute<bool>(frame, "bshd");
  Problem p = problem_of(frame, bshd);
  p.o = operand(*frame.results.items[0], bshd);
  p.softmax_lse = static_cast<float*>(frame.results.items[1]->data);
  Scratch scratch(frame);
  return attention_forward(p, place(frame, device, scratch));
}

// Arguments: q, k, v, the output, the LSE, the gradient of the output and, optionally, the gradient
// of the LSE. Results: the gradients of q, k and v.
Status backward(CallFrame const& frame, Device device) {
  bool const bshd = attribute<bool>(frame, "bshd");
  xla::Buffer* const* const args = frame.arguments.items;
  Problem p = problem_of(frame, bshd);
  p.o = operand(*args[3], bshd);
  p.softmax_lse = static_cast<float*>(args[4]->data);
  Gradients grad;
  grad.o = operand(*args[5], bshd);
  if (frame.arguments.count > 6) grad.softmax_lse = static_cast<float const*>(args[6]->data);
  grad.q = operand(*frame.results.items[0], bshd);
  grad.k = operand(*frame.results.items[1], bshd);
  grad.v = operand(*frame.results.items[2], bshd);
  grad.deterministic = attribute<bool>(frame, "deterministic");
  p.grad = &grad;
  Scratch scratch(frame);
  return attention_backward(p, place(frame, device, scratch));
}

template <Status (*function)(CallFrame const&, Device), Device device>
xla::Error* handler(CallFrame* frame) {
  for (xla::Extension* x = frame->extensions; x != nullptr; x = x->next) {
    if (x->type != xla::kMetadata) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(x)->metadata;
    metadata.version.major = xla::kMajor;
    metadata.version.minor = xla::kMinor;
    metadata.traits = 0;  // not for command buffers, because a first call may compile its kernel
    return nullptr;
  }
  try {
    return error(*frame, function(*frame, device));
  } catch (Status const& status) {
    return error(*frame, status);
  } catch (py::error_already_set& raised) {  // from the compiler of kernels
    py::gil_scoped_acquire locked;
    return error(*frame, Status::device_error(raised.what()));
  } catch (std::exception const& thrown) {
    return error(*frame, Status::device_error(thrown.what()));
  }
}

py::capsule capsule(xla::Error* (*function)(CallFrame*)) {
  return py::capsule(reinterpret_cast<void const*>(function));
}

}  // namespace

void define_jax_handlers(py::module_& m) {
  m.def("jax_handlers", [] {
    py::dict all;
    auto const add = [&all](char const* name, char const* platform, auto* function) {
      all[py::make_tuple(name, platform)] = capsule(function);
    };
    add("cutlass_attn_forward", "cpu", &handler<forward, Device::kCpu>);
    add("cutlass_attn_forward", "CUDA", &handler<forward, Device::kCuda>);
    add("cutlass_attn_backward", "cpu", &handler<backward, Device::kCpu>);
    add("cutlass_attn_backward", "CUDA", &handler<backward, Device::kCuda>);
    return all;
  });
}

}  // namespace cutlass_attn
