// Multi-threaded attention on the CPU: what CPU tensors use.
#pragma once

#include "cpu/tile.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn::cpu {

// Any valid call (see check()) with at least one query row, computed in fp32, or in
// fp64 of float64 operands. Returns when done.
// Uses at most options.num_threads threads; the result is the same for any number of them, down to
// the last bit.
Status attention_forward(Problem const& params, RunOptions const& options);

// The same with a given instruction set, which the processor must have.
Status attention_forward(Problem const& params, RunOptions const& options, Isa isa);

}  // namespace cutlass_attn::cpu
