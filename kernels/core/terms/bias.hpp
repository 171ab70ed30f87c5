// A bias that the kernel copies into shared memory with each tile of K, and adds by
// Score::with_bias().
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct TileBias {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.logits.bias.data != nullptr; }
};

}  // namespace cutlass_attn
