#include "runtime/dispatch.hpp"

#include <algorithm>

namespace cutlass_attn {
namespace {

char const* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
  }
  return "?";
}

char const* name_of(Device device) { return device == Device::kCpu ? "the CPU" : "a CUDA device"; }

std::string capability(int value) {
  return std::to_string(value / 10) + "." + std::to_string(value % 10);
}

// What a variant can lack. A request is at odds with the kernel; the rest is up to the machine or
// the build, where the same call could work on another one.
enum class Lack { kRequest, kEnvironment };

// Calls lacks(kind, reason) for everything that keeps `variant` from running the call. `reason` is
// a function that makes the text: on the way to a kernel that runs, none is made.
template <class Lacks>
void examine(Variant const& variant, AttnParams const& p, DeviceInfo const& device, Lacks&& lacks) {
  VariantInfo const& info = variant.info;
  if (info.device != device.device) {
    return lacks(Lack::kRequest, [&] {
      return std::string("needs operands on ") + name_of(info.device) + ", got them on " +
             name_of(device.device);
    });
  }
  if (info.dtype != p.dtype) {
    lacks(Lack::kRequest, [&] {
      return std::string("needs ") + name_of(info.dtype) + ", got " + name_of(p.dtype);
    });
  }
  if (info.head_dim != 0) {
    for (auto [name, value] : {std::pair("head_dim", p.head_dim), {"head_dim_v", p.head_dim_v}}) {
      if (value == info.head_dim) continue;
      lacks(Lack::kRequest, [&, name = name, value = value] {
        return std::string("needs ") + name + " " + std::to_string(info.head_dim) + ", got " +
               std::to_string(value);
      });
      break;  // a wrong head_dim alone says it
    }
  }
  if (variant.alignment > 1) {
    struct {
      char const* name;
      TensorRef const& ref;
      int heads, seqlen;
    } const operands[] = {{"q", p.q, p.num_heads_q, p.seqlen_q},
                          {"k", p.k, p.num_heads_kv, p.seqlen_k},
                          {"v", p.v, p.num_heads_kv, p.seqlen_k},
                          {"out", p.o, p.num_heads_q, p.seqlen_q}};
    int const element = p.dtype == DType::kFloat32 ? 4 : 2;
    for (auto const& [name, ref, heads, seqlen] : operands) {
      if (reinterpret_cast<uintptr_t>(ref.data) % unsigned(variant.alignment) != 0) {
        lacks(Lack::kRequest, [&, name = name] {
          return std::string(name) + "'s address is not a multiple of " +
                 std::to_string(variant.alignment) + " bytes";
        });
      }
      struct {
        char const* name;
        int64_t stride;
        int count;
      } const strides[] = {{"batch", ref.batch_stride, p.batch},
                           {"head", ref.head_stride, heads},
                           {"row", ref.row_stride, seqlen}};
      for (auto const& [dim, stride, count] : strides) {
        if (count <= 1 || stride % (variant.alignment / element) == 0) continue;
        lacks(Lack::kRequest, [&, name = name, dim = dim, stride = stride] {
          return std::string(name) + "'s " + dim + " stride of " + std::to_string(stride) +
                 " elements is not a multiple of " + std::to_string(variant.alignment) + " bytes";
        });
      }
    }
  }
  if (!device.unavailable.empty()) {
    return lacks(Lack::kEnvironment, [&] { return device.unavailable; });
  }
  if (device.compute_capability < variant.min_compute_capability) {
    lacks(Lack::kEnvironment, [&] {
      return "needs compute capability >= " + capability(variant.min_compute_capability) +
             ", the device has " + capability(device.compute_capability);
    });
  }
  if (variant.launch == nullptr) {
    lacks(Lack::kEnvironment, [&] {
      bool const is_simt = info.device == Device::kCpu;  // the CPU's own kernel is always there
      std::string options;
      if (info.tier == "full") options += " CUTLASS_ATTN_TIER=full";
      if (is_simt) options += " CUTLASS_ATTN_SIMT=ON";
      if (options.empty()) options = " CUTLASS_ATTN_CUDA=ON";
      return "not compiled into this build (tier " + info.tier + "): rebuild with" + options;
    });
  }
}

bool can_run(Variant const& variant, AttnParams const& params, DeviceInfo const& device) {
  bool result = true;
  examine(variant, params, device, [&](Lack, auto&&) { result = false; });
  return result;
}

Variant const* first(AttnParams const& params, DeviceInfo const& device,
                     std::string const& kernel) {
  for (Variant const& variant : registry()) {
    if (names(kernel, variant) && can_run(variant, params, device)) return &variant;
  }
  return nullptr;
}

Status unknown(std::string const& kernel) {
  std::string message = "kernel is \"" + kernel + "\", allowed: \"auto\"";
  std::string last;
  for (Variant const& variant : registry()) {
    if (variant.info.kernel != last) message += ", \"" + variant.info.kernel + "\"";
    last = variant.info.kernel;
  }
  return Status::invalid(message + ", or a whole key such as \"" + registry().front().info.key +
                         "\" (variants() lists them)");
}

Status refusal(AttnParams const& params, DeviceInfo const& device, std::string const& kernel) {
  std::string lines;
  bool is_named = false, is_request_at_fault = true;
  for (Variant const& variant : registry()) {
    if (!names(kernel, variant)) continue;
    is_named = true;
    // "auto" means one for this device; others would only repeat that they are not.
    if (kernel == "auto" && variant.info.device != device.device) continue;
    bool lacks_request = false;
    examine(variant, params, device,
            [&](Lack lack, auto&&) { lacks_request |= lack == Lack::kRequest; });
    is_request_at_fault &= lacks_request;
    lines += "\n  " + variant.info.key + ": " + why_not(variant, params, device);
  }
  if (!is_named) return unknown(kernel);
  if (!device.unavailable.empty()) {
    return Status::device_error(std::string("no kernel can run on ") + name_of(device.device) +
                                ": " + device.unavailable);
  }
  if (kernel == "auto") {
    return Status::no_kernel(std::string("no kernel takes this call on ") + name_of(device.device) +
                             ":" + lines);
  }
  std::string message = "kernel \"" + kernel + "\" does not take this call:" + lines;
  if (Variant const* other = first(params, device, "auto")) {
    message += "\nkernel \"" + other->info.kernel + "\" would take it";
  }
  return is_request_at_fault ? Status::invalid(message) : Status::no_kernel(message);
}

}  // namespace

std::string why_not(Variant const& variant, AttnParams const& params, DeviceInfo const& device) {
  std::string reasons;
  examine(variant, params, device, [&](Lack, auto&& reason) {
    if (!reasons.empty()) reasons += "; ";
    reasons += reason();
  });
  return reasons;
}

bool names(std::string const& kernel, Variant const& variant) {
  if (kernel == "auto") return variant.info.automatic;
  return kernel == variant.info.kernel || kernel == variant.info.key;
}

Variant const* select(AttnParams const& params, DeviceInfo const& device, std::string const& kernel,
                      Status& status) {
  Variant const* const variant = first(params, device, kernel);
  if (variant == nullptr) status = refusal(params, device, kernel);
  return variant;
}

}  // namespace cutlass_attn
