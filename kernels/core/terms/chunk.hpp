// Attention chunks (Llama 4). They are part of the interval mask and do not change the logit. They
// are a term because masking them costs registers, which kernels without the term do not pay.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct Chunk {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.mask.attention_chunk != 0; }
};

}  // namespace cutlass_attn
