// Choice of a kernel: pure functions of the call and the device, tested without a GPU.
#pragma once

#include <string>

#include "runtime/registry.hpp"

namespace cutlass_attn {

// Why `variant` cannot run this (valid) call on `device`; empty if it can.
std::string why_not(Variant const& variant, AttnParams const& params, DeviceInfo const& device);

// Does `kernel` name this variant: "auto" (the automatic ones), its kernel, or its whole key?
bool names(std::string const& kernel, Variant const& variant);

// The first variant that `kernel` names and that can run; otherwise null and in `status` what each
// candidate lacked.
Variant const* select(AttnParams const& params, DeviceInfo const& device, std::string const& kernel,
                      Status& status);

}  // namespace cutlass_attn
