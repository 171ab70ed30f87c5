// Online softmax over the rows of an accumulator: core/softmax.hpp for each row a thread holds.
#pragma once

#include "core/math.hpp"
#include "core/opaque.hpp"
#include "core/softmax.hpp"

namespace cutlass_attn {

// Scores are in units of their own: factor(i) and offset(i, row max), of the multiply-add that
// makes a score of row i the exponent of 2 of its weight, and in_log2(i, score).
//
// These: scores times log2_scale.
struct ScaledUnits {
  float log2_scale;
  CUTE_DEVICE float factor(int) const { return log2_scale; }
  CUTE_DEVICE float offset(int, float row_max) const { return -row_max; }
  CUTE_DEVICE float in_log2(int, float score) const { return score * log2_scale; }
};

// The four threads of a quad hold one row of an m16n8 accumulator together; every thread keeps the
// row max (in units of log2: its log2_scale is 1) and the sum of its own columns.
//
// The row max lags: softmax is the same whatever is subtracted from the scores, as long as no
// weight overflows and the largest does not vanish. So P = exp(S - row max) is first computed with
// the row max of the key blocks before, and the exponentials need not wait for a reduction over the
// row. Next to always that was it. Only where the sum of a thread's weights shows that one grew
// large, the row max is updated and O rescaled, as in the textbook. A row without a row max (-inf)
// has infinite weights, or NaN, and gets its first one in the same way.
//
// That is code for P twice. Where scores cost more code than P, softmax_weights_checked() looks at
// the scores before: a thread's own ones, which needs no reduction either.
//
// The row max has 24 bits: beyond scores of 2^24 it is off by whole units of log2, and the weights
// of a row by one common factor, which in fp16 overflows or underflows from about 2^28 on. Not so
// for the general score, which is in units of log2 itself: its row max is one of the scores. (To
// subtract first, as core/softmax.hpp does, is one more instruction a score.)
template <class Arch, int kRows, int kMaxWeightSum = 4096>
struct SoftmaxRows {
  // Bound for the sum of one thread's weights in a key block: fp16 is good for 16 times 4096.
  static constexpr float kLimit = float(kMaxWeightSum);

  SoftmaxRow rows[kRows];
  // Of this thread's weights of the present key block, until add_sums(); where they are rounded to
  // 8 bits the largest instead.
  float sums[kRows];

  // Turns the scores of a key block into weights, without looking for their maximum. False: some
  // are too large.
  //   s: (row, key)
  //   units: log2_scale, or units as above
  template <class S, class Units>
  CUTE_DEVICE bool softmax_weights(S&& s, Units const& units) {
    static_assert(rows_of<decltype(s)> == kRows);
    bool ok = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      weights_of_row(s, i, units.factor(i), units.offset(i, rows[i].max));
      ok = ok && is_small(i);
    }
    return ok;
  }
  template <class S>
  CUTE_DEVICE bool softmax_weights(S&& s, float log2_scale) {
    return softmax_weights(s, ScaledUnits{log2_scale});
  }

  // Whether softmax_weights() found the weights of row i small enough.
  CUTE_DEVICE bool is_small(int i) const { return sums[i] <= kLimit; }

  // The same after updating the row max where it has to be, from the scores once more.
  //   s: (row, key), all keys of the key block in this quad
  //   o: (row, column)
  template <class S, class O>
  CUTE_DEVICE void softmax_weights_rescaled(S&& s, O&& o, float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      weights_of_row_rescaled(s, o, block_max(s, i, !is_small(i)), i, log2_scale);
    }
  }

  // Both in one, for scores that take much code: looks at them before there are weights.
  template <class S, class O>
  CUTE_DEVICE void softmax_weights_checked(S&& s, O&& o, float log2_scale) {
    update_max_checked(s, o, log2_scale);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      weights_of_row(s, i, log2_scale, -rows[i].row_max_ref());
      // Without, the sum is computed after dropout, from copies of the weights.
      sums[i] = opaque(sums[i]);
    }
  }

  // Updates the row max for scores that would have too large weights, and rescales O.
  template <class S, class O>
  CUTE_DEVICE void update_max_checked(S const& s, O&& o, float log2_scale) {
    static_assert(columns_of<decltype(s)> * 256 <= kMaxWeightSum);
    float largest[kRows];
    largest_of_thread(s, largest, std::false_type{});
    update_max_checked(largest, o, log2_scale);
  }
  template <class O>
  CUTE_DEVICE void update_max_checked(float const (&largest)[kRows], O&& o, float log2_scale) {
    constexpr float kLog2Largest = 8.0f;  // of a weight
    bool fits[kRows], all_fit = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      fits[i] = fmaf(largest[i], log2_scale, -rows[i].max) <= kLog2Largest;
      all_fit = all_fit && fits[i];
    }
    unpredicated_if(Arch::any(!all_fit), [&] {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        rescale(o, {any_of_quad(!fits[i]), max_of_quad(largest[i])}, i, log2_scale);
      }
    });
  }

  // The same with the row max brought up to date first, while O is still being accumulated: it has
  // to be multiplied by `factors` later.
  template <class S>
  CUTE_DEVICE void softmax_weights_after_max(S&& s, float (&factors)[kRows], float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      factors[i] = rows[i].update_max(max_of_quad(s, i) * log2_scale, 1.0f);
      weights_of_row(s, i, log2_scale, -rows[i].row_max_ref());
    }
  }

  // Steps of that for scores that come in parts. The largest ones of this thread, with those that
  // were the largest before:
  template <class S, class HasBefore>
  CUTE_DEVICE static void largest_of_thread(S const& s, float (&largest)[kRows], HasBefore) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const max = max_of_thread(s, i);
      largest[i] = HasBefore::value ? fmaxf(largest[i], max) : max;
    }
  }
  template <class S>
  CUTE_DEVICE void softmax_weights_of_max(S&& s, float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) weights_of_row(s, i, log2_scale, -rows[i].row_max_ref());
  }

  template <class S, class O, class Units>
  CUTE_DEVICE void softmax_weights_rescaled(S&& s, O&& o, Units const& units) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      update_max_of_row(s, o, units, i);
      weights_of_row(s, i, units.factor(i), units.offset(i, rows[i].row_max_ref()));
    }
  }

  // Updates the row max of row i if its weights were too large, and rescales O.
  template <class S, class O, class Units>
  CUTE_DEVICE void update_max_of_row(S const& s, O&& o, Units const& units, int i) {
    rescale(o, {any_of_quad(!is_small(i)), max_of_quad(s, i, units)}, i, 1.0f);
  }

  // What a quad knows of a row of a key block.
  struct BlockMax {
    int is_too_large;  // whether the sum of its weights is
    float max;         // of its scores
  };

  template <class S>
  CUTE_DEVICE static BlockMax block_max(S const& s, int i, int is_too_large) {
    return {any_of_quad(is_too_large), max_of_quad(s, i)};
  }

  // Updates the row max of row i if any weight is too large, and rescales O.
  //   o: (row, column)
  template <class O>
  CUTE_DEVICE void rescale(O&& o, BlockMax const& block, int i, float log2_scale) {
    static_assert(rows_of<decltype(o)> == kRows);
    // Other rows of the warp keep theirs: what they come to must not depend on this one.
    float const candidate = block.is_too_large ? block.max * log2_scale : -kInf;
    float const factor = rows[i].update_max(candidate, 1.0f);
    scale(o, i, factor);
  }

  // Turns the scores of row i into weights after that.
  template <class S, class O>
  CUTE_DEVICE void weights_of_row_rescaled(S&& s, O&& o, BlockMax const& block, int i,
                                           float log2_scale) {
    rescale(o, block, i, log2_scale);
    weights_of_row(s, i, log2_scale, -rows[i].row_max_ref());
  }

  CUTE_DEVICE void add_sums() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i].sum += sums[i];
  }

  // The row max of the first key block, in advance.
  template <class S>
  CUTE_DEVICE void start(S const& s, float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i].max = max_of_quad(s, i) * log2_scale;
  }

  CUTE_DEVICE void start(float const (&largest)[kRows], float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i].max = max_of_quad(largest[i]) * log2_scale;
  }

  template <class S, class Units>
  CUTE_DEVICE void start(S const& s, Units const& units) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i].max = max_of_quad(s, i, units);
  }

  // Completes the sums of the rows, of which each thread has its own columns.
  CUTE_DEVICE void complete_sums() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 1);
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 2);
    }
  }

  // The largest score of row i: of those that this thread has, and of all.
  template <class S>
  CUTE_DEVICE static float max_of_thread(S const& s, int i) {
    float max = s(i, 0);
    CUTE_UNROLL
    for (int j = 1; j < columns_of<decltype(s)>; ++j) max = fmaxf(max, s(i, j));
    return max;
  }
  template <class S>
  CUTE_DEVICE static float max_of_quad(S const& s, int i) {
    return max_of_quad(max_of_thread(s, i));
  }
  // The same in units of log2, where the threads of a quad have scores of different ones.
  template <class S, class Units>
  CUTE_DEVICE static float max_of_quad(S const& s, int i, Units const& units) {
    return max_of_quad(units.in_log2(i, max_of_thread(s, i)));
  }

  // Multiplies row i of O.
  template <class O>
  CUTE_DEVICE static void scale(O&& o, int i, float factor) {
    CUTE_UNROLL
    for (int j = 0; j < columns_of<decltype(o)>; ++j) o(i, j) *= factor;
  }

 private:
  CUTE_DEVICE static float max_of_quad(float max) {
    max = fmaxf(max, Arch::shuffle_xor(max, 1));
    return fmaxf(max, Arch::shuffle_xor(max, 2));
  }
  CUTE_DEVICE static int any_of_quad(int x) {
    x |= Arch::shuffle_xor(x, 1);
    return x | Arch::shuffle_xor(x, 2);
  }

  // Weights of row i from its scores, and their sum.
  template <class S>
  CUTE_DEVICE void weights_of_row(S&& s, int i, float factor, float offset) {
    CUTE_UNROLL
    for (int j = 0; j < columns_of<decltype(s)>; ++j) {
      s(i, j) = fast_exp2(fmaf(s(i, j), factor, offset));
      sums[i] = j == 0 ? s(i, 0) : sums[i] + s(i, j);
    }
  }
};

}  // namespace cutlass_attn
