// Whether offsets, lengths and pages that lie on the host fit the operands they are of.
#pragma once

#include "core/problem.hpp"
#include "core/status.hpp"

namespace cutlass_attn {

// Of a (valid) call that runs on the CPU.
Status check_lengths(Problem const& problem);

// Of the pages that hold the first `rows` keys of a batch entry.
Status check_pages(KvStore const& kv, int32_t batch_entry, int64_t rows);

}  // namespace cutlass_attn
