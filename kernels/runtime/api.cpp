// The public interface, put together from check, dispatch and device. The CUTLASS_ATTN_* strings
// come from CMake.
#include "cutlass_attn.hpp"

#include "runtime/device.hpp"
#include "runtime/dispatch.hpp"
#include "runtime/loaded.hpp"

namespace cutlass_attn {

Status attention_forward(AttnParams const& params, LaunchOptions const& options) {
  Status status = check(params);
  if (!status.ok()) return status;
  DeviceInfo const device = device_info(options.device, options.device_index);
  Variant const* variant = select(params, device, options.kernel, status);
  if (variant == nullptr) return status;
  if (params.batch == 0 || params.num_heads_q == 0 || params.seqlen_q == 0) return {};
  if (options.device == Device::kCpu) return variant->launch(params, options);
  DeviceGuard const guard(options.device_index);
  if (!guard.status().ok()) return guard.status();
  if (variant->launch != nullptr) return variant->launch(params, options);

  KernelImage const* image = loaded(*variant, device.compute_capability);
  if (image == nullptr) {
    status = may_load(*variant, options.stream);
    if (status.ok()) status = compile(*variant, options.device_index);
    if (!status.ok()) return status;
    image = loaded(*variant, device.compute_capability);
    // Without a kernel, the compiler has said by set_compiler() or refuse_kernel() that there will
    // be none.
    bool const is_refused = image == nullptr && !why_not_compiled(*variant).empty();
    if (is_refused) return attention_forward(params, options);
    if (image == nullptr) {
      return Status::device_error("the compiler did not provide " + variant->info.key);
    }
  }
  return launch(*image, params, options);
}

std::vector<VariantInfo> variants() {
  std::vector<VariantInfo> result;
  for (Variant const& variant : registry()) result.push_back(variant.info);
  return result;
}

std::vector<Verdict> explain(AttnParams const& params, DeviceInfo const& device,
                             std::string const& kernel) {
  std::vector<Verdict> result;
  Status ignored;
  Variant const* const chosen = select(params, device, kernel, ignored);
  for (Variant const& variant : registry()) {
    Verdict verdict{variant.info.key, &variant == chosen, why_not(variant, params, device)};
    if (!names(kernel, variant)) {
      if (!verdict.reason.empty()) verdict.reason += "; ";
      verdict.reason += kernel == "auto" ? "runs only when asked for by name"
                                         : "not asked for: kernel is \"" + kernel + "\"";
    } else if (verdict.reason.empty() && !verdict.chosen) {
      verdict.reason = why_preferred(*chosen, variant, params, device);
    }
    result.push_back(std::move(verdict));
  }
  return result;
}

BuildInfo build_info() {
  BuildInfo info;
  info.version = CUTLASS_ATTN_VERSION;
  info.tier = CUTLASS_ATTN_TIER;
  info.cuda = CUTLASS_ATTN_CUDA_VERSION;
  info.architectures = CUTLASS_ATTN_ARCHITECTURES;
  info.cutlass = CUTLASS_ATTN_CUTLASS_VERSION;
#if defined(__clang__)
  info.compiler = "clang " __clang_version__;
#else
  info.compiler = "g++ " __VERSION__;
#endif
  info.simt = CUTLASS_ATTN_SIMT;
  return info;
}

}  // namespace cutlass_attn
