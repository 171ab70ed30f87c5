// Rows of m16n8 accumulators on their way to memory, 16 bytes at a time.
#pragma once

#include <cute/numeric/int.hpp>

#include "core/macros.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn {

// Stores row `row` of blocks [first, first + 4) at `target`, column 0 of the row, which has
// `columns` columns, a multiple of 8. All lanes of a warp call it together; is_row: false stores
// nothing.
template <class Arch, class Element>
CUTE_DEVICE void store_columns(Element* target, uint32_t (&words)[4], int first, int columns,
                               bool is_row, int lane) {
  transpose_quad<Arch>(words, lane);
  int const column = (first + lane % 4) * 8;
  if (is_row && column < columns) {
    *reinterpret_cast<cute::uint128_t*>(target + column) =
        cute::uint128_t{uint64_t(words[0]) | uint64_t(words[1]) << 32,
                        uint64_t(words[2]) | uint64_t(words[3]) << 32};
  }
}

}  // namespace cutlass_attn
