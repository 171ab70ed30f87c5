// Online softmax over the rows of an accumulator: core/softmax.hpp for each row of a thread.
#pragma once

#include "core/math.hpp"
#include "core/opaque.hpp"
#include "core/softmax.hpp"
#include "tile/fragment.hpp"
#include "tile/units.hpp"

namespace cutlass_attn {

// Maximum over a quad, for one row of a key block.
struct BlockMax {
  int is_too_large;  // whether the sum of weights is
  float max;         // largest score
};

// The largest scores of kRows rows; nothing for 0 rows.
template <int kRows>
struct Largest {
  float of_row[kRows];
  CUTE_DEVICE Largest() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) of_row[i] = -kInf;
  }
  CUTE_DEVICE void add(int i, float score) { of_row[i] = fmaxf(of_row[i], score); }
};
template <>
struct Largest<0> {};

// The four threads of a quad share a row of an m16n8 accumulator. Each thread keeps the row max, in
// units of log2 (SoftmaxRow with log2_scale = 1), and the sum over its own columns.
//
// The row max lags. Softmax does not depend on the number that is subtracted from the scores, as
// long as no weight overflows and the largest weight does not vanish. So P = exp(S - row max) is
// computed with the row max of the previous key blocks, and the exponentials need not wait for a
// reduction over the row. This almost always suffices. If the sum of a thread's weights shows that
// one of them is too large, the row max is updated and O rescaled, as in textbook online softmax. A
// row without a row max (-inf) gets weights of infinity or NaN, and so its first row max.
//
// This duplicates the code of P. If scores take more code than P, use softmax_weights_checked(): it
// compares the thread's own scores before it computes weights, also without a reduction.
//
// The row max has 24 bits. For scores beyond 2^24 it is off by whole units of log2, and the weights
// of a row are off by a common factor, which in fp16 overflows or underflows from about 2^28 on.
// The general score is not affected: it is in units of log2, so its row max equals one of the
// scores. (Subtracting first, as in core/softmax.hpp, takes one more instruction per score.)
//
// kKeepsLargest: whether to keep the largest score of each row, for MaxLogit. Scores that are
// recomputed are compared again, which changes nothing.
template <class Arch, int kRows, int kMaxWeightSum = 4096, bool kKeepsLargest = false>
struct SoftmaxRows {
  // Bound of the sum of one thread's weights in a key block. fp16 can hold 16 times 4096.
  static constexpr float kLimit = float(kMaxWeightSum);

  static constexpr bool kKeeps = kKeepsLargest;

  SoftmaxRow rows[kRows];
  // This thread's sum of weights in the present key block, until add_sums(). If weights are rounded
  // to 8 bits: the largest weight.
  float sums[kRows];
  // Largest scores in units of log2: of this thread, and after complete_largest() of the row.
  Largest<kKeepsLargest ? kRows : 0> largest;

  // Turns the scores of a key block into weights, with the lagging row max. Returns false if some
  // weights are too large, or scores beyond the limit of the units.
  //   s:     (row, key)
  //   units: log2_scale, or units of tile/units.hpp
  template <class S, class Units>
  CUTE_DEVICE bool softmax_weights(S&& s, Units const& units) {
    static_assert(rows_of<decltype(s)> == kRows);
    bool ok = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      weights_of_row(s, i, units, units.offset(i, rows[i].max));
      ok = ok && is_small(i);
    }
    return ok;
  }
  template <class S>
  CUTE_DEVICE bool softmax_weights(S&& s, float log2_scale) {
    return softmax_weights(s, ScaledUnits{log2_scale});
  }

  // Whether the weights of row i from softmax_weights() are small enough.
  CUTE_DEVICE bool is_small(int i) const { return sums[i] <= kLimit; }

  // Turns scores, recomputed by the caller, into weights. Updates the row max first where needed.
  //   s: (row, key), all keys of the key block in this quad
  //   o: (row, column)
  template <class S, class O>
  CUTE_DEVICE void softmax_weights_rescaled(S&& s, O&& o, float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      weights_of_row_rescaled(s, o, block_max(s, i, !is_small(i)), i, log2_scale);
    }
  }

  // softmax_weights() and the update in one, for scores with much code: checks scores first.
  template <class S, class O>
  CUTE_DEVICE void softmax_weights_checked(S&& s, O&& o, float log2_scale) {
    update_max_checked(s, o, log2_scale);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      weights_of_row(s, i, ScaledUnits{log2_scale}, -rows[i].row_max_ref());
      // Without opaque, the sum is computed after dropout, from copies of the weights.
      sums[i] = opaque(sums[i]);
    }
  }

  // If the scores would give weights above 2^kLog2Largest, updates the row max and rescales O.
  template <int kLog2Largest = 8, class S, class O>
  CUTE_DEVICE void update_max_checked(S const& s, O&& o, float log2_scale) {
    static_assert(columns_of<decltype(s)> << kLog2Largest <= kMaxWeightSum);
    float largest[kRows];
    largest_of_thread(s, largest, std::false_type{});
    update_max_checked<kLog2Largest>(largest, o, log2_scale);
  }
  template <int kLog2Largest = 8, class O>
  CUTE_DEVICE void update_max_checked(float const (&largest)[kRows], O&& o, float log2_scale) {
    bool fits[kRows], all_fit = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      fits[i] = fmaf(largest[i], log2_scale, -rows[i].max) <= float(kLog2Largest);
      all_fit = all_fit && fits[i];
    }
    unpredicated_if(Arch::any(!all_fit), [&] {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        rescale(o, {any_of_quad(!fits[i]), max_of_quad(largest[i])}, i, log2_scale);
      }
    });
  }

  // Updates the row max, then turns scores into weights. O is still being accumulated: the caller
  // multiplies it by `factors` later.
  template <class S>
  CUTE_DEVICE void softmax_weights_after_max(S&& s, float (&factors)[kRows], float log2_scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      factors[i] = rows[i].update_max(max_of_quad(s, i) * log2_scale, 1.0f);
      weights_of_row(s, i, ScaledUnits{log2_scale}, -rows[i].row_max_ref());
    }
  }

  // Steps of softmax_weights_after_max(), for scores that come in parts. First: the largest scores
  // of this thread, including those of the previous parts.
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
    for (int i = 0; i < kRows; ++i)
      weights_of_row(s, i, ScaledUnits{log2_scale}, -rows[i].row_max_ref());
  }

  template <class S, class O, class Units>
  CUTE_DEVICE void softmax_weights_rescaled(S&& s, O&& o, Units const& units) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      update_max_of_row(s, o, units, i);
      weights_of_row(s, i, units, units.offset(i, rows[i].row_max_ref()));
    }
  }

  // If the weights of row i were too large: updates its row max and rescales O.
  template <class S, class O, class Units>
  CUTE_DEVICE void update_max_of_row(S const& s, O&& o, Units const& units, int i) {
    rescale(o, {any_of_quad(!is_small(i)), max_of_quad(s, i, units)}, i, 1.0f);
  }

  template <class S>
  CUTE_DEVICE static BlockMax block_max(S const& s, int i, int is_too_large) {
    return {any_of_quad(is_too_large), max_of_quad(s, i)};
  }

  // Updates the row max of row i if any weight is too large, and rescales O.
  //   o: (row, column)
  template <class O>
  CUTE_DEVICE void rescale(O&& o, BlockMax const& block, int i, float log2_scale) {
    static_assert(rows_of<decltype(o)> == kRows);
    // Other rows of the warp keep their row max: their results must not depend on this row.
    float const candidate = block.is_too_large ? block.max * log2_scale : -kInf;
    float const factor = rows[i].update_max(candidate, 1.0f);
    scale(o, i, factor);
  }

  // rescale(), then turns the scores of row i into weights.
  template <class S, class O>
  CUTE_DEVICE void weights_of_row_rescaled(S&& s, O&& o, BlockMax const& block, int i,
                                           float log2_scale) {
    rescale(o, block, i, log2_scale);
    weights_of_row(s, i, ScaledUnits{log2_scale}, -rows[i].row_max_ref());
  }

  CUTE_DEVICE void add_sums() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows[i].sum += sums[i];
  }

  // Sets the row max to the maximum of the first key block.
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

  // Completes the row sums: adds the partial sums of the quad's threads.
  CUTE_DEVICE void complete_sums() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 1);
      rows[i].sum += Arch::shuffle_xor(rows[i].sum, 2);
    }
  }

  CUTE_DEVICE void complete_largest() {
    if constexpr (kKeepsLargest) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) largest.of_row[i] = max_of_quad(largest.of_row[i]);
    }
  }

  // Makes the largest score the row max, which splits of keys merge. Nothing is done unless it is
  // kept.
  //   o: (row, column)
  template <class O>
  CUTE_DEVICE void raise_to_largest(O&& o) {
    if constexpr (kKeepsLargest) {
      complete_largest();
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) scale(o, i, rows[i].update_max(largest.of_row[i], 1.0f));
    }
  }

  // Largest score of row i: in this thread, and in its quad.
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
  // Largest score in units of log2, if the threads of a quad hold scores in different units.
  template <class S, class Units>
  CUTE_DEVICE static float max_of_quad(S const& s, int i, Units const& units) {
    return max_of_quad(units.in_log2(i, max_of_thread(s, i)));
  }

  // Multiplies row i of O by `factor`.
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
  template <class S, class Units>
  CUTE_DEVICE void weights_of_row(S&& s, int i, Units const& units, float offset) {
    [[maybe_unused]] float top = -kInf, largest_size = 0.0f;
    if constexpr (kKeepsLargest) top = units.in_log2(i, max_of_thread(s, i));
    CUTE_UNROLL
    for (int j = 0; j < columns_of<decltype(s)>; ++j) {
      if constexpr (Units::kHasLimit) largest_size = fmaxf(largest_size, fabsf(s(i, j)));
      s(i, j) = fast_exp2(units.exponent(i, s(i, j), offset, float(FragmentPlace<1, 1>::step(j))));
      sums[i] = j == 0 ? s(i, 0) : sums[i] + s(i, j);
    }
    if constexpr (Units::kHasLimit) {  // beyond it, the weights are computed again
      bool const fits = largest_size <= units.limit();
      sums[i] = fits ? sums[i] : kInf;
      top = fits ? top : -kInf;
    }
    if constexpr (kKeepsLargest) largest.add(i, top);
  }
};

}  // namespace cutlass_attn
