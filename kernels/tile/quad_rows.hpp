// Stores rows of m16n8 accumulators, 16 bytes at a time.
#pragma once

#include "core/vector.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn {

// Stores a row of four m16n8 blocks from `first` on. words[i]: this thread's two 16-bit columns of
// block i. `target`: address of column 0 of the row. `columns`: columns of the row, a multiple of
// 8. Called by all lanes of a warp; stores nothing unless is_row.
template <class Arch, class Element>
CUTE_DEVICE void store_columns(Element* target, uint32_t (&words)[4], int first, int columns,
                               bool is_row, int lane) {
  transpose_quad<Arch>(words, lane);
  int const column = (first + lane % 4) * 8;
  if (is_row && column < columns) {
    *reinterpret_cast<Vector16*>(target + column) =
        Vector16{uint64_t(words[0]) | uint64_t(words[1]) << 32,
                 uint64_t(words[2]) | uint64_t(words[3]) << 32};
  }
}

}  // namespace cutlass_attn
