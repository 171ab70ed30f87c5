// Whether strided operands share memory. Exact for any strides; fast for usual strides.
#pragma once

#include <cstdint>

namespace cutlass_attn {

// Rows of row_bytes contiguous bytes at address + sum over d of i_d * strides[d], for 0 <= i_d <
// counts[d]. Strides are in bytes and may be negative; the stride of a count of 1 is ignored.
struct StridedRows {
  static constexpr int kDims = 4;
  int64_t address;
  int64_t strides[kDims];
  int64_t counts[kDims];
  int64_t row_bytes;
};

// Largest distance, in bytes, between the first bytes of two rows for the functions below.
inline constexpr int64_t kMaxSpan = int64_t(1) << 58;

// False if two rows lie further apart than kMaxSpan.
bool span_is_sane(StridedRows const& rows);

// Whether two different rows share a byte.
bool overlaps_itself(StridedRows const& rows);

// Whether a row of `a` shares a byte with a row of `b`.
bool overlap(StridedRows const& a, StridedRows const& b);

}  // namespace cutlass_attn
