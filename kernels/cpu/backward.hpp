// Multi-threaded backward pass for CPU tensors, and the forward pass in float64.
#pragma once

#include "cpu/tile.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn::cpu {

// Computes any valid backward pass (see check()) with at least one row of queries or keys, in fp32,
// or in fp64 if operands are float64. Returns when done. Uses at most options.num_threads threads;
// the result does not depend on their number, bit for bit.
Status attention_backward(Problem const& params, RunOptions const& options);

// With a given instruction set, which the processor must support.
Status attention_backward(Problem const& params, RunOptions const& options, Isa isa);

// attention_forward() for float64 operands.
Status attention_forward_float64(Problem const& params, RunOptions const& options, Isa isa);

}  // namespace cutlass_attn::cpu
