// A bias and a bool mask that the kernel loads at the point of use, the entries of two neighbouring
// keys at a time. Keys are contiguous in their rows, and pairs are aligned to their size.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct PairBias {  // of q's dtype
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.logits.bias.data != nullptr; }
};

struct PairMask {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.mask.elements.data != nullptr; }
};

}  // namespace cutlass_attn
