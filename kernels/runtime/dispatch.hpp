// Selects a kernel: pure functions of call and device, tested without a GPU.
#pragma once

#include <string>

#include "runtime/registry.hpp"

namespace cutlass_attn {

// Why `variant` cannot run this (valid) call on `device`; empty if it can.
std::string why_not(Variant const& variant, Problem const& problem, DeviceInfo const& device);

// Whether `kernel` names this variant: "auto" (automatic variants), a kernel, or a whole key.
bool names(std::string const& kernel, Variant const& variant);

// Selects the variant to run: among those that `kernel` names, the first that can run the call, in
// the order of the manifest's kernels and then of their tiles: less padding of head dims first,
// then as tuned.toml prefers. A kernel that `avoids` the call comes last. From the first variant
// with a cost on, the least predicted time decides. Null if none can run; `status` then says what
// each candidate lacks. Allocates nothing on success, after the first call has built its lists.
Variant const* select(Problem const& problem, Op op, DeviceInfo const& device,
                      std::string const& kernel, Status& status);

// Facts of an instance; those known in advance if it is not compiled yet.
KernelFacts facts_of(Variant const& variant);

// Number of blocks of the variant that share the keys of a tile of rows.
int splits_of(Variant const& variant, Problem const& problem, DeviceInfo const& device);

// Why select() preferred `chosen` to `other`, which can run as well.
std::string why_preferred(Variant const& chosen, Variant const& other, Problem const& problem,
                          DeviceInfo const& device);

}  // namespace cutlass_attn
