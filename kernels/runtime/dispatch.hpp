// Choice of a kernel: pure functions of the call and the device, tested without a GPU.
#pragma once

#include <string>

#include "runtime/registry.hpp"

namespace cutlass_attn {

// Why `variant` cannot run this (valid) call on `device`; empty if it can.
std::string why_not(Variant const& variant, Problem const& problem, DeviceInfo const& device);

// Does `kernel` name this variant: "auto" (the automatic ones), its kernel, or its whole key?
bool names(std::string const& kernel, Variant const& variant);

// The variant to run: of those that `kernel` names, the first in one order that can run the call.
// The order is that of the kernels in the manifest, then of their tiles, with the least padding of
// head dims first, then as tuned.toml prefers them. A kernel that `avoids` the call comes last, and
// from the first variant with a cost on, the least predicted time counts. Null if none can run, and
// then `status` says what each candidate lacked. Allocates nothing on success, once
// the first call has prepared its lists.
Variant const* select(Problem const& problem, Op op, DeviceInfo const& device,
                      std::string const& kernel, Status& status);

// What is known of an instance before it is compiled, perhaps.
KernelFacts facts_of(Variant const& variant);

// Over how many blocks of the variant the keys of a tile of rows are split.
int splits_of(Variant const& variant, Problem const& problem, DeviceInfo const& device);

// Why `chosen`, by select(), was preferred to `other`, which can run as well.
std::string why_preferred(Variant const& chosen, Variant const& other, Problem const& problem,
                          DeviceInfo const& device);

}  // namespace cutlass_attn
