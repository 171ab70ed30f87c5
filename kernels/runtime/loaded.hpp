// Kernels that were compiled at run time.
//
// The library compiles nothing itself. A program that can, sets a compiler: it is called by the
// first call that wants a kernel which this build left out, or the score of one, and hands the
// machine code back through load_kernel().
#pragma once

#include <string>

#include "runtime/registry.hpp"

namespace cutlass_attn {

// Every score of a variant is compiled by itself, under the variant's key and its own token: a
// first call waits for one kernel alone. Where a variant has one score, or all are compiled
// together, the key stands alone.
std::string entry_key(Variant const& variant, int score, std::string const& score_mod = {});

// Why this score of a variant that this build left out cannot be compiled now; empty if it can.
std::string const& why_not_compiled(Variant const& variant, int score);

// The variant's kernel with this score for GPUs of this compute capability, or null if none has
// been loaded.
KernelUnit const* loaded(Variant const& variant, int score, int compute_capability);

// The same of its kernel with this score and a user's score_mod.
KernelUnit const* loaded_with(Variant const& variant, int score, std::string const& score_mod,
                              int compute_capability);

// Has the compiler set provide it for the device. score_mod: its name; empty: without one.
Status compile(Variant const& variant, int score, std::string const& score_mod, int device_index);

// What refuse_kernel() does.
void refuse(Variant const& variant, int score, std::string why_not);

// An error while the stream, one of the current device, is captured into a CUDA graph: nothing can
// be loaded then.
Status may_load(Variant const& variant, int score, std::string const& score_mod, void* stream);

}  // namespace cutlass_attn
