// A bool mask, read by the launch before the kernel (core/mask_map.hpp). Its bits include causal
// masks, windows and attention chunks.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct MaskBits {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.mask.elements.data != nullptr; }
};

}  // namespace cutlass_attn
