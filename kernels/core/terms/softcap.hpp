// Softcap (Gemma 2): logit = softcap * tanh(softmax_scale * s / softcap).
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

// Without a cap, the logit is softmax_scale * s for a scale of either sign.
struct Softcap {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.logits.softcap != 0.0f; }
};

}  // namespace cutlass_attn
