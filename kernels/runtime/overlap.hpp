// Do strided operands share memory? Exact for any strides, and instant for the usual ones.
#pragma once

#include <cstdint>

namespace cutlass_attn {

// Rows of row_bytes contiguous bytes at address + the sum over d of i_d * strides[d], for all
// 0 <= i_d < counts[d]. Strides are in bytes and of any sign; that of a count of 1 is not used.
struct StridedRows {
  static constexpr int kDims = 4;
  int64_t address;
  int64_t strides[kDims];
  int64_t counts[kDims];
  int64_t row_bytes;
};

// Largest distance in bytes between the first bytes of two rows that the functions below accept.
inline constexpr int64_t kMaxSpan = int64_t(1) << 58;

// False if the rows lie further apart than kMaxSpan.
bool span_is_sane(StridedRows const& rows);

// Do two different rows share a byte?
bool overlaps_itself(StridedRows const& rows);

// Does a row of `a` share a byte with a row of `b`?
bool overlap(StridedRows const& a, StridedRows const& b);

}  // namespace cutlass_attn
