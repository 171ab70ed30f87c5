// The problem of merge_states() as plain data: merges the attention results of two disjoint sets of
// keys.
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace cutlass_attn {

// One natural log-sum-exp per query head and row. Strides count elements.
struct PerRow {
  float* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// With w the softmax of the two log-sum-exps of a row: o = w_a a + w_b b. -inf and +inf both mean
// that a row saw no key; its values are then ignored, even if they are NaN.
struct MergeProblem {
  Operand a, b, o;  // (batch, num_heads, seqlen, head_dim) of one dtype
  PerRow lse_a, lse_b, lse;
  int32_t batch = 0;
  int32_t num_heads = 0;
  int32_t seqlen = 0;
  int32_t head_dim = 0;
};

}  // namespace cutlass_attn
