// Calls with products in 8 bits in two halves: K and V are rounded once, for any number of calls.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn {

// Rounds K and V into options.workspace, or memory of options.allocate, as the launch before the
// kernel of attention_forward(problem, options) does. That depends on K, V, their sizes and
// Problem::quantize, which must not be none; a Q and O stand in, and are neither read nor written.
// A kernel that has no such launch, as on a CPU, asks for no workspace and does nothing.
CUTLASS_ATTN_API Status prequantize(Problem const& problem, LaunchOptions const& options);

// attention_forward() without that launch: options.workspace has what prequantize() made on the
// same device of the same K, V and Problem::quantize; all else of the problem may be another. It is
// only read, so that calls may share it.
CUTLASS_ATTN_API Status attention_prequantized(Problem const& problem,
                                               LaunchOptions const& options);

// Predicts the error of each query head of a dense problem on options.device, as max_error decides
// by it (core/predict.hpp), into errors (batch, num_heads_q). Operands and errors are the CPU's.
CUTLASS_ATTN_API Status predict_errors(Problem const& problem, LaunchOptions const& options,
                                       float* errors);

}  // namespace cutlass_attn
