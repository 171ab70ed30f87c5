// What merge.cpp launches on a GPU.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn::serving {

struct MergeParams;

// The device is current; the problem has rows.
Status merge_on_device(MergeParams const& params, RunOptions const& options);

}  // namespace cutlass_attn::serving
