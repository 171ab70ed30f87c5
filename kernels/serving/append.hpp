// What append.cpp launches on a GPU.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn::serving {

struct AppendParams;

// The device is current; the problem has rows.
Status append_on_device(AppendParams const& params, RunOptions const& options);

}  // namespace cutlass_attn::serving
