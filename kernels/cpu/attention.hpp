// Multi-threaded attention for CPU tensors.
#pragma once

#include "cpu/tile.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn::cpu {

// Computes any valid call (see check()) with at least one query row, in fp32, or in fp64 if
// operands are float64. Returns when done. Uses at most options.num_threads threads; the result
// does not depend on their number, bit for bit.
Status attention_forward(Problem const& params, RunOptions const& options);

// With a given instruction set, which the processor must support.
Status attention_forward(Problem const& params, RunOptions const& options, Isa isa);

// Predicts the error of each query head of a call with products in 8 bits (core/predict.hpp), for
// the CPU or for a GPU, into errors (batch, num_heads_q).
Status predict_errors(Problem const& params, RunOptions const& options, bool is_gpu, float* errors);

}  // namespace cutlass_attn::cpu
