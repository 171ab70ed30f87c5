// What a caller is told of kernels that did not run a call: one line for each reason of a kernel.
#pragma once

#include <string>
#include <vector>

#include "runtime/registry.hpp"

namespace cutlass_attn {

// The error where no variant that `kernel` names can run the call. Of each kernel it names the
// variants that come closest, those with one reason on one line. A name that nothing has is
// answered by those that are spelt most like it.
Status refusal(Problem const& problem, Op op, DeviceInfo const& device, std::string const& kernel);

// Kernels that select() prefers to `chosen` and that are made for calls of this kind, in order of
// preference, with the reason of the variants that come closest. `chosen` is null if none can run.
std::vector<PassedOver> passed_over(Problem const& problem, Op op, DeviceInfo const& device,
                                    std::string const& kernel, Variant const* chosen);

}  // namespace cutlass_attn
