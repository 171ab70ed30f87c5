// Multi-threaded backward pass on the CPU, what CPU tensors use, and the forward pass of float64.
#pragma once

#include "cpu/tile.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn::cpu {

// Any valid backward pass (see check()) with at least one row of queries or keys, computed in fp32,
// or in fp64 of float64 operands. Returns when done. Uses at most options.num_threads threads; the
// result is the same for any number of them, down to the last bit.
Status attention_backward(Problem const& params, RunOptions const& options);

// The same with a given instruction set, which the processor must have.
Status attention_backward(Problem const& params, RunOptions const& options, Isa isa);

// attention_forward() of float64 operands.
Status attention_forward_float64(Problem const& params, RunOptions const& options, Isa isa);

}  // namespace cutlass_attn::cpu
