// Rearranges rows of m16n8 accumulators, so that they are stored 16 bytes at a time.
#pragma once

#include <cute/config.hpp>

#include "core/macros.hpp"
#include "core/vector.hpp"

namespace cutlass_attn {

// The four threads of a quad hold a row of four neighbouring m16n8 blocks: word i of a thread is
// two 16-bit columns of block i. Transposes the 4 x 4 words, so that thread t of the quad holds all
// eight columns of block t. transpose_quad() of tile/fragment.hpp does so with selects in place of
// branches. With selects, ptxas 13.0 allocates other registers in the backward kernels of sm80;
// with branches, in the forward kernels of sm90. Which is faster was not measured.
template <class Arch>
CUTE_DEVICE void gather_columns(uint32_t (&words)[4], int lane) {
  CUTE_UNROLL
  for (int bit = 1; bit < 4; bit *= 2) {
    bool const is_upper = lane & bit;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t const sent = is_upper ? words[i] : words[i | bit];
      uint32_t const received = Arch::shuffle_xor(sent, bit);
      if (is_upper) {
        words[i] = received;
      } else {
        words[i | bit] = received;
      }
    }
  }
}

// Stores a row of blocks [first, first + 4). `target`: address of column 0 of the row. `columns`:
// columns of the row, a multiple of 8. Called by all lanes of a warp; stores nothing unless is_row.
template <class Arch, class Element>
CUTE_DEVICE void store_columns(Element* target, uint32_t (&words)[4], int first, int columns,
                               bool is_row, int lane) {
  gather_columns<Arch>(words, lane);
  int const column = (first + lane % 4) * 8;
  if (is_row && column < columns) {
    *reinterpret_cast<Vector16*>(target + column) =
        Vector16{uint64_t(words[0]) | uint64_t(words[1]) << 32,
                 uint64_t(words[2]) | uint64_t(words[3]) << 32};
  }
}

}  // namespace cutlass_attn
