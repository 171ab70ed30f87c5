// Dropout of a key block between softmax and P V. Weights are already rounded, two in a word.
#pragma once

#include <cute/config.hpp>

#include "core/dropout.hpp"

namespace cutlass_attn {

// Mask of a word of two weights: 0xffff in the half of each kept weight. `at`: the keys' distance
// from a multiple of 32, itself a multiple of 8.
//   second: 0 for query q of the draw, 1 for q + 8
//   words:  of one draw; or of two draws, if both halves of a word belong to one row or key
template <class Arch>
CUTE_DEVICE uint32_t kept_weights(DropoutMask const& dropout, PhiloxWords const& words, int second,
                                  int at) {
  uint32_t const(&w)[4] = words.word;
  uint32_t number = at >= 16 ? w[2 + second] : w[second];
  uint32_t const other = at >= 16 ? w[3 - second] : w[1 - second];
  if (at % 16 >= 8) number = Arch::prmt(number, other, 0x2705);
  return Arch::below_15bit(number, dropout.thresholds) ^ dropout.flip;
}

// Draws of a thread's rows for 32 keys. All rows are queries of one head (core/scheduler.hpp).
template <class Arch, int kRowBlocks>
struct DrawnRows {
  PhiloxWords words[kRowBlocks];

  template <class Place, class Coord>
  CUTE_DEVICE void draw(DropoutMask const& dropout, Place const& place, Coord const& tile,
                        int key) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      words[m] = dropout.draw(tile.seq.batch, tile.head_q, tile.q_begin + place.row(2 * m),
                              key + place.column(0));
    }
  }

  // Applies dropout to the weights of a key block of kKeys keys, `at` keys after a multiple of 32.
  //   p: A operand; words alternate between rows g and g + 8, n8 block after n8 block
  template <int kKeys, class P>
  CUTE_DEVICE void drop(DropoutMask const& dropout, int at, P&& p) const {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < kKeys / 4; ++i) {
        p[i / 4][m][i % 4] &= kept_weights<Arch>(dropout, words[m], i % 2, at + i / 2 * 8);
      }
    }
  }
};

}  // namespace cutlass_attn
