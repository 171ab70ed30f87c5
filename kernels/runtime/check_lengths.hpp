// Whether offsets, lengths and pages in host memory fit the operands that they describe.
#pragma once

#include "core/problem.hpp"
#include "core/status.hpp"

namespace cutlass_attn {

// For a (valid) call that runs on the CPU.
Status check_lengths(Problem const& problem);

// Checks the pages of the first `rows` keys of a batch entry.
Status check_pages(KvStore const& kv, int32_t batch_entry, int64_t rows);

}  // namespace cutlass_attn
