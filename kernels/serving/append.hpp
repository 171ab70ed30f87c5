// The launch on a GPU, which append.cpp calls.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn::serving {

struct AppendParams;

// The device is already current, and the problem has at least one row.
Status append_on_device(AppendParams const& params, RunOptions const& options);

}  // namespace cutlass_attn::serving
