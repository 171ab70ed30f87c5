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
//
// That is code for weights twice. Where scores cost more code than weights, weigh_raised() looks at
// the scores before: a thread's own ones, which needs no reduction either.
template <class Arch, int kRows, int kWeightLimit = 4096>
struct SoftmaxRows {
  // Bound for the sum of one thread's weights in a slice: a float16 is good for 16 times 4096.
  static constexpr float kLimit = float(kWeightLimit);

  SoftmaxRow rows[kRows];
  float sums[kRows];  // of this thread's weights of the slice in hand, until add()

  // Turns the scores of a slice into weights, without looking for their maximum. False: some are
  // too large.
  //   s: (row, key)
  template <class S>
  CUTE_DEVICE bool weigh(S&& s, float log2_scale) {
    using namespace cute;
    static_assert(decltype(size<0>(s))::value == kRows);
    bool ok = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      weigh_row(s, i, log2_scale, rows[i].max);
      ok = ok && is_small(i);
    }
    return ok;
  }

  // Whether weigh() found the weights of row i small enough.
  CUTE_DEVICE bool is_small(int i) const { return sums[i] <= kLimit; }

  // Turns the scores of a slice into weights after raising the references that need it; rescales O.
  //   s: (row, key)
  //   o: (row, column)
  template <class S, class O>
  CUTE_DEVICE void weigh_raised(S&& s, O&& o, float log2_scale) {
    using namespace cute;
    constexpr float kLog2Largest = 8.0f;  // of a weight
    static_assert(decltype(size<1>(s))::value * 256 <= kWeightLimit);
    bool fits[kRows], all_fit = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      fits[i] = fmaf(largest_of_thread(s, i), log2_scale, -rows[i].max) <= kLog2Largest;
      all_fit = all_fit && fits[i];
    }
    branch(Arch::any(!all_fit), [&] {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) raise_reference(o, peak(s, i, !fits[i]), i, log2_scale);
    });
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      weigh_row(s, i, log2_scale, rows[i].reference());
      sums[i] = Arch::compute(sums[i]);  // or it comes after dropout, from copies of the weights
    }
  }

  // What a quad knows of a row whose reference it may have to raise.
  struct Peak {
    int is_too_large;  // whether a sum of its weights is
    float largest;     // of its scores
  };

  // Of row i, from the scores and what this thread knows.
  template <class S>
  CUTE_DEVICE static Peak peak(S const& s, int i, int is_too_large) {
    is_too_large |= Arch::shuffle_xor(is_too_large, 1);
    is_too_large |= Arch::shuffle_xor(is_too_large, 2);
    return {is_too_large, largest_of(s, i)};
  }

  // Raises the reference of row i to the peak if any weight is too large; rescales O.
  //   o: (row, column)
  template <class O>
  CUTE_DEVICE void raise_reference(O&& o, Peak const& peak, int i, float log2_scale) {
    using namespace cute;
    static_assert(decltype(size<0>(o))::value == kRows);
    // Other rows of the warp keep theirs: what they come to must not depend on this one.
    float const candidate = peak.is_too_large ? peak.largest * log2_scale : -kInf;
    float const rescale = rows[i].raise(candidate, 1.0f);
    scale(o, i, rescale);
  }

  // Turns the scores of row i into weights after that.
  template <class S, class O>
  CUTE_DEVICE void raise_row(S&& s, O&& o, Peak const& peak, int i, float log2_scale) {
    raise_reference(o, peak, i, log2_scale);
    weigh_row(s, i, log2_scale, rows[i].reference());
  }

  // The same for all rows, where a quad has all scores of its rows.
  template <class S, class O>
  CUTE_DEVICE void raise(S&& s, O&& o, float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) raise_row(s, o, peak(s, i, !is_small(i)), i, log2_scale);
  }

  CUTE_DEVICE void add() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i].sum += sums[i];
  }

  // References for the first slice; without, raise() finds them.
  template <class S>
  CUTE_DEVICE void start(S const& s, float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i].max = largest_of(s, i) * log2_scale;
  }

  // Completes the sums of the rows, of which each thread has its own columns.
  CUTE_DEVICE void complete() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 1);
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 2);
    }
  }

  // Largest score of row i that this thread has.
  template <class S>
  CUTE_DEVICE static float largest_of_thread(S const& s, int i) {
    using namespace cute;
    float largest = s(i, 0);
    CUTE_UNROLL
    for (int j = 1; j < size<1>(s); ++j) largest = fmaxf(largest, s(i, j));
    return largest;
  }

  // Largest score of row i.
  template <class S>
  CUTE_DEVICE static float largest_of(S const& s, int i) {
    float largest = largest_of_thread(s, i);
    largest = fmaxf(largest, Arch::shuffle_xor(largest, 1));
    return fmaxf(largest, Arch::shuffle_xor(largest, 2));
  }

  // Multiplies row i of O.
  template <class O>
  CUTE_DEVICE static void scale(O&& o, int i, float factor) {
    using namespace cute;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(o); ++j) o(i, j) *= factor;
  }

 private:
  // Weights of row i from its scores, and their sum.
  template <class S>
  CUTE_DEVICE void weigh_row(S&& s, int i, float log2_scale, float reference) {
    using namespace cute;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(s); ++j) {
      s(i, j) = fast_exp2(fmaf(s(i, j), log2_scale, -reference));
      sums[i] = j == 0 ? s(i, 0) : sums[i] + s(i, j);
    }
  }
};

}  // namespace cutlass_attn
