// The launch on a GPU, which merge.cpp calls.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn::serving {

struct MergeParams;

// The device is already current, and the problem has at least one row.
Status merge_on_device(MergeParams const& params, RunOptions const& options);

}  // namespace cutlass_attn::serving
