// A bias of q's dtype. The kernel loads it for each tile of logits and adds it by
// Score::with_bias(). On Hopper TMA copies it with the tile of K. Elsewhere one load reads the
// entries of two neighbouring keys, aligned to their size.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct TileBias {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.logits.bias.data != nullptr; }
};

}  // namespace cutlass_attn
