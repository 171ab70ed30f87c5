// Kernels that were compiled at run time.
//
// The library compiles nothing itself. A program that can, sets a compiler: it is called by the
// first call that wants a kernel which this build left out, and hands the machine code back through
// load_kernel().
#pragma once

#include <string>

#include "runtime/registry.hpp"

namespace cutlass_attn {

// Why a variant that this build left out cannot be compiled now; empty if it can.
std::string const& why_not_compiled(Variant const& variant);

// The variant's kernel for GPUs of this compute capability, or null if none has been loaded.
KernelUnit const* loaded(Variant const& variant, int compute_capability);

// Has the compiler set provide the variant for the device.
Status compile(Variant const& variant, int device_index);

// An error while the stream, one of the current device, is captured into a CUDA graph: nothing can
// be loaded then.
Status may_load(Variant const& variant, void* stream);

}  // namespace cutlass_attn
