// Whether a request may have its keys where they are: tokens in bytes, and lists.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn {

// What tokens in a format of bytes go with.
Status check_tokens(Problem const& p);

// What lists of keys go with.
Status check_indices(Problem const& p, Op op);

}  // namespace cutlass_attn
