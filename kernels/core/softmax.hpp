// Online softmax of one query row (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention,
// arXiv 2205.14135): a row max and a row sum, in the units of a score functor.
//
// Every kernel and every merge of partial results uses this state:
//
//   float const rescale = row.update_max(max of the new scores, log2_scale);  // O *= rescale
//   for each new score x:  p = row.weight(x, log2_scale);  row.sum += p;  // O += p * v
//   with a sink:           O *= row.add_logit(sink, log2_scale);
//   at the end:            O *= row.inverse_sum();  lse = row.lse(log2_scale);
//
// core/epilogue.hpp has the last two.
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"

namespace cutlass_attn {

struct SoftmaxRow {
  float max = -kInf;  // largest score so far; -inf: no score, or all of them -inf
  float sum = 0.0f;   // of the weights, relative to max

  // Raises the row max to at least `candidate`. Returns the factor for everything accumulated so
  // far; `sum` is already multiplied by it.
  CA_HOST_DEVICE float update_max(float candidate, float log2_scale) {
    float const previous = max;
    max = fmaxf(previous, candidate);
    // Subtracts before it multiplies. previous * log2_scale - max * log2_scale may become a fused
    // multiply-add, which is off by the rounding of one product even if the maximum stays: a drift
    // that grows with every key tile.
    float const rescale = fast_exp2((previous - row_max_ref()) * log2_scale);
    sum *= rescale;
    return rescale;
  }

  // The row max to subtract from scores. It is 0 for a row without a finite score, so that the
  // row's weights are 2^-inf = 0 and not 2^(-inf + inf) = NaN.
  CA_HOST_DEVICE float row_max_ref() const { return max == -kInf ? 0.0f : max; }

  // exp(score - row max). Subtracts first here as well: score * log2_scale minus a rounded product
  // has the rounding error of that product, which dominates for logits beyond 1e9.
  CA_HOST_DEVICE float weight(float score, float log2_scale) const {
    return weight(score, row_max_ref(), log2_scale);
  }
  CA_HOST_DEVICE static float weight(float score, float row_max_ref, float log2_scale) {
    return fast_exp2((score - row_max_ref) * log2_scale);
  }

  // Merges the state of a disjoint set of keys. Returns the factor for this O; other_factor is the
  // factor for the other O.
  CA_HOST_DEVICE float merge(SoftmaxRow const& other, float log2_scale, float& other_factor) {
    float const mine = update_max(other.max, log2_scale);
    other_factor = fast_exp2((other.max - row_max_ref()) * log2_scale);
    sum += other.sum * other_factor;
    return mine;
  }

  // Adds the weight of a logit that has no value row, an attention sink. Returns the factor for O.
  CA_HOST_DEVICE float add_logit(float logit, float log2_scale) {
    float const score = logit * (kLog2e / log2_scale);
    float const rescale = update_max(score, log2_scale);
    sum += weight(score, log2_scale);
    return rescale;
  }

  // 0 for a row that saw no key, NaN for a row whose sum is NaN.
  CA_HOST_DEVICE float inverse_sum() const { return sum == 0.0f ? 0.0f : fast_reciprocal(sum); }

  // Natural log of the sum of exp(logit); -inf for a row that saw no key.
  CA_HOST_DEVICE float lse(float log2_scale) const {
    return sum == 0.0f ? -kInf : (max * log2_scale + fast_log2(sum)) * kLn2;
  }
};

}  // namespace cutlass_attn
