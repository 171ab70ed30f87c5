// Online softmax over the rows of an accumulator: core/softmax.hpp for each row a thread holds.
#pragma once

#include <cute/tensor.hpp>

#include "core/softmax.hpp"

namespace cutlass_attn {

// The four threads of a quad hold one row of an m16n8 accumulator together; every thread keeps the
// row's maximum and the sum of its own columns.
template <class Arch, int kRows>
struct SoftmaxRows {
  SoftmaxRow rows[kRows];

  // Takes in a block of scores and leaves their weights in its place; rescales O.
  //   s: (row, key)   o: (row, column)
  template <class S, class O>
  CUTE_DEVICE void update(S& s, O& o, float log2_scale) {
    using namespace cute;
    static_assert(decltype(size<0>(s))::value == kRows);
    static_assert(decltype(size<0>(o))::value == kRows);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float largest = s(i, 0);
      CUTE_UNROLL
      for (int j = 1; j < size<1>(s); ++j) largest = fmaxf(largest, s(i, j));
      largest = fmaxf(largest, Arch::shuffle_xor(largest, 1));
      largest = fmaxf(largest, Arch::shuffle_xor(largest, 2));

      SoftmaxRow& row = rows[i];
      float const rescale = row.raise(largest, log2_scale);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(s); ++j) {
        s(i, j) = row.weight(s(i, j), log2_scale);
        row.sum += s(i, j);
      }
      CUTE_UNROLL
      for (int j = 0; j < size<1>(o); ++j) o(i, j) *= rescale;
    }
  }

  // Completes the sums and normalises O.
  template <class O>
  CUTE_DEVICE void finish(O& o) {
    using namespace cute;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 1);
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 2);
      float const inverse = rows[i].inverse_sum();
      CUTE_UNROLL
      for (int j = 0; j < size<1>(o); ++j) o(i, j) *= inverse;
    }
  }
};

}  // namespace cutlass_attn
