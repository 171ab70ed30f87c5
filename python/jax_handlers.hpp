// Attention as foreign functions of XLA, for cutlass_attn.jax.
#pragma once

#include <pybind11/pybind11.h>

namespace cutlass_attn {

// Defines jax_handlers in _C: capsules by (name, platform), which jax.ffi registers.
void define_jax_handlers(pybind11::module_& m);

}  // namespace cutlass_attn
