// Softcap (Gemma 2): logit = softcap * tanh(softmax_scale * s / softcap).
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

// tanh(x) to 1e-7 for |x| <= kSmallTanh, by an odd polynomial. fast_tanh() has two MUFU
// instructions, which an SM issues at an eighth of the rate of fused multiply-adds.
inline constexpr float kSmallTanh = 0.75f;
CA_HOST_DEVICE float small_tanh(float x) {
  float const t = x * x;
  float y = -0.00470384769f;
  y = fmaf(y, t, 0.0195653122f);
  y = fmaf(y, t, -0.0533356778f);
  y = fmaf(y, t, 0.133252278f);
  y = fmaf(y, t, -0.333329469f);
  y = fmaf(y, t, 0.99999994f);
  return y * x;
}

// Without a cap, the logit is softmax_scale * s for a scale of any sign.
struct Softcap {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.logits.softcap != 0.0f; }
};

}  // namespace cutlass_attn
