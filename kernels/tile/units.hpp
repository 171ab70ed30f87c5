// Units of scores: what turns a score into the base-2 exponent of its weight. Softmax is
// instantiated with one of them; a term that the exponent can apply costs no instruction before it.
//
//   ScaledUnits    logit = score * scale
//   LineUnits      ALiBi left of the diagonal: a shift of each row joins the scale
//   SoftcapUnits   softcap(score)
//
// Interface, for row i:
//   offset(i, row_max)            what exponent() wants of the row max
//   exponent(i, score, offset, step)   exponent of the weight; step: see FragmentPlace
//   in_log2(i, score)             the logit in units of log2; grows with the score
//   kHasLimit                     whether all this holds only for |score| <= limit()
#pragma once

#include <cute/config.hpp>

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/terms/alibi.hpp"
#include "core/terms/softcap.hpp"

namespace cutlass_attn {

struct ScaledUnits {
  static constexpr bool kHasLimit = false;
  float log2_scale;
  CUTE_DEVICE float factor(int) const { return log2_scale; }
  CUTE_DEVICE float offset(int, float row_max) const { return -row_max; }
  CUTE_DEVICE float exponent(int, float score, float offset, float) const {
    return fmaf(score, log2_scale, offset);
  }
  CUTE_DEVICE float in_log2(int, float score) const { return score * log2_scale; }
};

// kAddsSteps: whether exponent() adds slope * step(j) to a score. Else it is added already.
template <int kRows, bool kAddsSteps>
struct LineUnits {
  static constexpr bool kHasLimit = false;
  float log2_scale;
  Alibi::Line<kRows> line;
  CUTE_DEVICE float offset(int i, float row_max) const { return line.shift[i] - row_max; }
  CUTE_DEVICE float exponent(int i, float score, float offset, float step) const {
    if constexpr (kAddsSteps) score = fmaf(line.slope[i], step, score);
    return fmaf(score, log2_scale, offset);
  }
  CUTE_DEVICE float in_log2(int i, float score) const {
    static_assert(!kAddsSteps);
    return fmaf(score, log2_scale, line.shift[i]);
  }
};

// kIsAny: for scores of any size, with equal bits for scores within the limit.
template <bool kIsAny, int kCount>
struct SoftcapUnits {
  static constexpr bool kHasLimit = !kIsAny;
  Softcap::Powers<kCount> powers;
  CUTE_DEVICE float limit() const { return powers.limit; }
  CUTE_DEVICE float offset(int, float row_max) const { return -row_max; }
  CUTE_DEVICE float exponent(int, float score, float offset, float) const {
    Softcap::Product const x = product(score);
    return fmaf(x.a, x.b, offset + x.c);
  }
  CUTE_DEVICE float in_log2(int, float score) const {
    Softcap::Product const x = product(score);
    return x.a * x.b + x.c;
  }

 private:
  CUTE_DEVICE Softcap::Product product(float score) const {
    if constexpr (kIsAny) {
      return powers.of_any(score);
    } else {
      return powers.of_small(score);
    }
  }
};

}  // namespace cutlass_attn
