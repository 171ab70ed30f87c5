// A bias of q's dtype that the kernel brings for each tile of logits, and adds by
// Score::with_bias(): on Hopper by TMA, with the tile of K; elsewhere it reads the entries of two
// neighbouring keys at a time, which begin at a multiple of their size.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct TileBias {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.logits.bias.data != nullptr; }
};

}  // namespace cutlass_attn
