// Checks calls whose keys are 8-bit latent tokens, or rows of a list.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn {

// Checks what tokens in an 8-bit format can be combined with.
Status check_tokens(Problem const& p);

// Checks what lists of keys can be combined with.
Status check_indices(Problem const& p, Op op);

}  // namespace cutlass_attn
