// Online softmax over the rows of an accumulator: core/softmax.hpp for each row a thread holds.
#pragma once

#include <cute/tensor.hpp>

#include "core/math.hpp"
#include "core/softmax.hpp"

namespace cutlass_attn {

// The four threads of a quad hold one row of an m16n8 accumulator together; every thread keeps the
// row's reference (the state's maximum, in units of log2: its log2_scale is 1) and the sum of its
// own columns.
//
// Any reference gives the same softmax as long as no weight overflows and the largest does not
// vanish. So weights are first computed with the reference as it is, before anybody knows the
// maximum of the new scores: the exponentials need not wait for a reduction over the row, and next
// to always that was it. Only where a sum shows that a weight grew large, reference() is raised to
// the maximum, as in the textbook. A row without a reference (-inf) has infinite weights, or NaN,
// and gets its first one in the same way.
template <class Arch, int kRows>
struct SoftmaxRows {
  // Bound for the sum of one thread's weights in a slice: a float16 is good for 16 times as much.
  static constexpr float kLimit = 4096.0f;

  SoftmaxRow rows[kRows];

  // Weights of a slice of scores, without looking for its maximum. False: some are too large.
  //   s, w: (row, key)   sums: of this thread's weights of each row
  template <class S, class W>
  CUTE_DEVICE bool weigh(S const& s, W&& w, float (&sums)[kRows], float log2_scale) const {
    using namespace cute;
    static_assert(decltype(size<0>(s))::value == kRows);
    bool ok = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(s); ++j) {
        w(i, j) = fast_exp2(fmaf(s(i, j), log2_scale, -rows[i].max));
        sums[i] = j == 0 ? w(i, 0) : sums[i] + w(i, j);
      }
      ok = ok && sums[i] <= kLimit;
    }
    return ok;
  }

  // What a quad knows of a row whose reference it may have to raise.
  struct Peak {
    int is_too_large;  // whether some of its weights are
    float largest;     // of its scores
  };

  // Of row i, whose sum of weights weigh() found.
  template <class S>
  CUTE_DEVICE static Peak peak(S const& s, float sum, int i) {
    using namespace cute;
    Peak x{!(sum <= kLimit), s(i, 0)};
    CUTE_UNROLL
    for (int j = 1; j < size<1>(s); ++j) x.largest = fmaxf(x.largest, s(i, j));
    CUTE_UNROLL
    for (int lane_mask = 1; lane_mask <= 2; lane_mask *= 2) {
      x.is_too_large |= Arch::shuffle_xor(x.is_too_large, lane_mask);
      x.largest = fmaxf(x.largest, Arch::shuffle_xor(x.largest, lane_mask));
    }
    return x;
  }

  // Weights and sum of row i after raising its reference to the peak, if any weight was too large;
  // rescales O.
  //   o: (row, column)
  template <class S, class W, class O>
  CUTE_DEVICE void raise(S const& s, W&& w, O&& o, Peak const& peak, int i, float& sum,
                         float log2_scale) {
    using namespace cute;
    // Other rows of the warp keep theirs: what they come to must not depend on this one.
    float const rescale =
        rows[i].raise(peak.is_too_large ? peak.largest * log2_scale : -kInf, 1.0f);
    float const reference = rows[i].reference();
    CUTE_UNROLL
    for (int j = 0; j < size<1>(s); ++j) {
      w(i, j) = fast_exp2(fmaf(s(i, j), log2_scale, -reference));
      sum = j == 0 ? w(i, 0) : sum + w(i, j);
    }
    CUTE_UNROLL
    for (int j = 0; j < size<1>(o); ++j) o(i, j) *= rescale;
  }

  // The same for all rows, where a quad has all the scores of a row. `sums` are those that weigh()
  // found.
  template <class S, class W, class O>
  CUTE_DEVICE void raise(S const& s, W&& w, O&& o, float (&sums)[kRows], float log2_scale) {
    using namespace cute;
    static_assert(decltype(size<0>(o))::value == kRows);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) raise(s, w, o, peak(s, sums[i], i), i, sums[i], log2_scale);
  }

  CUTE_DEVICE void add(float const (&sums)[kRows]) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i].sum += sums[i];
  }

  // Completes the sums of the rows, of which each thread has its own columns.
  CUTE_DEVICE void complete() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 1);
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 2);
    }
  }

  // Multiplies row i of O.
  template <class O>
  CUTE_DEVICE static void scale(O&& o, int i, float factor) {
    using namespace cute;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(o); ++j) o(i, j) *= factor;
  }
};

}  // namespace cutlass_attn
