// Kernels compiled at run time.
//
// The library itself compiles nothing. A program with a compiler registers it by set_compiler().
// The first call that needs a kernel, or a score of a kernel, that this build left out calls the
// compiler, which returns the machine code through load_kernel().
#pragma once

#include <string>

#include "runtime/registry.hpp"

namespace cutlass_attn {

// Key of an entry. Each score of a variant is compiled separately, under the variant's key and the
// score's token, so that a first call waits for one kernel only. The key has no token if the
// variant has one score, or if all scores are compiled together.
std::string entry_key(Variant const& variant, int score, std::string const& score_mod = {});

// Why this score of a variant that this build left out cannot be compiled now; empty if it can.
std::string const& why_not_compiled(Variant const& variant, int score);

// The variant's loaded kernel with this score for GPUs of this compute capability, or null.
KernelUnit const* loaded(Variant const& variant, int score, int compute_capability);

// loaded() for a kernel with this score and a user's score_mod.
KernelUnit const* loaded_with(Variant const& variant, int score, std::string const& score_mod,
                              int compute_capability);

// Compiles the kernel for the device, by the registered compiler. score_mod: its name, or empty.
Status compile(Variant const& variant, int score, std::string const& score_mod, int device_index);

// Implements refuse_kernel().
void refuse(Variant const& variant, int score, std::string why_not);

// An error if the stream, of the current device, is being captured into a CUDA graph: nothing can
// be loaded then.
Status may_load(Variant const& variant, int score, std::string const& score_mod, void* stream);

}  // namespace cutlass_attn
