// Calls with products in 8 bits, in two halves: K and V are rounded once, for any number of calls.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn {

// Rounds K and V into options.workspace or memory of options.allocate, like the launch before the
// kernel of attention_forward(problem, options). The result depends on K, V, their sizes and
// Problem::quantize, which must not be none. Q and O are placeholders, neither read nor written.
// For a kernel without that launch, as on a CPU, the workspace is empty and nothing happens.
CUTLASS_ATTN_API Status prequantize(Problem const& problem, LaunchOptions const& options);

// attention_forward() without that launch. options.workspace is the result of prequantize() on the
// same device, for equal K, V and Problem::quantize; the rest of the problem may differ. The
// workspace is only read, so calls may share it.
CUTLASS_ATTN_API Status attention_prequantized(Problem const& problem,
                                               LaunchOptions const& options);

// Predicts the error of each query head of a dense problem on options.device, from which max_error
// decides (core/predict.hpp), into errors (batch, num_heads_q). Operands and errors are in host
// memory.
CUTLASS_ATTN_API Status predict_errors(Problem const& problem, LaunchOptions const& options,
                                       float* errors);

}  // namespace cutlass_attn
