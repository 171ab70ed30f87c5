// A bool mask, as the launch before the kernel has read it (core/mask_map.hpp). Causal masks,
// windows and attention chunks are in its bits, too.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct MaskBits {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.mask.elements.data != nullptr; }
};

}  // namespace cutlass_attn
