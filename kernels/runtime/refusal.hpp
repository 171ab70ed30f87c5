// Messages about kernels that did not run a call: one line per reason of a kernel.
#pragma once

#include <string>
#include <vector>

#include "runtime/registry.hpp"

namespace cutlass_attn {

// The error if `kernel` names no variant of the build; it suggests the names that are spelt most
// like it.
Status check_name(std::string const& kernel, Op op);

// The error if no variant that `kernel` names can run the call. For each kernel it lists the
// variants that come closest; variants with one reason share a line. For an unknown name that of
// check_name().
Status refusal(Problem const& problem, Op op, DeviceInfo const& device, std::string const& kernel);

// Kernels that select() prefers to `chosen` and that are for this kind of call, in order of
// preference, each with the reasons of its closest variants. `chosen`: null if none can run.
std::vector<PassedOver> passed_over(Problem const& problem, Op op, DeviceInfo const& device,
                                    std::string const& kernel, Variant const* chosen);

}  // namespace cutlass_attn
