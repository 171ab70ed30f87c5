// Q in int8, in registers: converts the fragments that ldmatrix loads for m16n8k16 to those of
// m16n8k32, with a scale per row (core/quantize.hpp). Also converts sums of products to scores.
//
// The int32 accumulators begin with the bits of kMagic, 1.5 * 2^23. Their bits are then those of
// the float kMagic + sum, so no conversion is needed. If a score goes to softmax unmodified, its
// exponent is one multiply-add, as in 16 bits:
//
//   (kMagic + sum) * factor - (kMagic * factor + row max),    factor = scales and log2_scale
//
// The rounding error is at most one unit of the sum: a hundredth of the error of rounding Q and K.
// Softcap and other terms first subtract kMagic.
#pragma once

#include "core/opaque.hpp"
#include "core/quantize.hpp"
#include "quantized/products.hpp"

namespace cutlass_attn {

template <class Config, class Score, class Arch>
struct QuantizedQueries {
  using Step = Products<Config, Score, Arch>;
  using Element = typename Config::Element;
  using Address = typename Arch::SmemAddress;
  using Words = typename Step::Words;
  static constexpr int kRows = Config::kRows, kRowBlocks = Config::kRowBlocks;
  static constexpr int kSteps16 = Config::kHeadDim / 16;

  // Loads the warp's rows from shared memory, and finds their scales.
  CUTE_DEVICE static void load(Address q_rows, typename Step::Q& q, float (&scale)[kRows]) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      float inverse[2];
      find_factors(q_rows, m, scale[2 * m], scale[2 * m + 1], inverse);
      CUTE_UNROLL
      for (int k = 0; k < Step::kSteps; ++k) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {  // 16 columns each
          Words words;
          Step::load_q(q_rows, m, 2 * k + half, words);
          CUTE_UNROLL
          for (int row = 0; row < 2; ++row) {  // g and g + 8
            q[k][m][2 * half + row] = to_int8(words[row], words[2 + row], inverse[row]);
          }
        }
      }
    }
  }

  // q . shift of this thread's row i, summed over its quad.
  CUTE_DEVICE static float dot(Address q_rows, int i, float const* shift, int columns) {
    float sum = 0.0f;
    int const first = Arch::thread() % 4 * 2;
    CUTE_NO_UNROLL
    for (int k = 0; k < kSteps16; ++k) {
      Words words;
      Step::load_q(q_rows, i / 2, k, words);
      if (k * 16 >= columns) continue;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t const pair = words[2 * half + i % 2];
        float const* const factors = shift + k * 16 + half * 8 + first;
        sum = fmaf(low(pair), factors[0], sum);
        sum = fmaf(high(pair), factors[1], sum);
      }
    }
    sum += Arch::shuffle_xor(sum, 1);
    return sum + Arch::shuffle_xor(sum, 2);
  }

 private:
  CUTE_DEVICE static float low(uint32_t pair) { return element_to_float<Element>(uint16_t(pair)); }
  CUTE_DEVICE static float high(uint32_t pair) {
    return element_to_float<Element>(uint16_t(pair >> 16));
  }

  // Rounds two columns and the two columns 8 further on.
  CUTE_DEVICE static uint32_t to_int8(uint32_t pair, uint32_t pair8, float inverse) {
    return Arch::pack_bytes(
        quantize::to_int8(low(pair), inverse), quantize::to_int8(high(pair), inverse),
        quantize::to_int8(low(pair8), inverse), quantize::to_int8(high(pair8), inverse));
  }

  // For rows g and g + 8 of an m16 block: the scale, and the factor of the elements.
  CUTE_DEVICE static void find_factors(Address q_rows, int m, float& scale, float& scale8,
                                       float (&inverse)[2]) {
    uint32_t amax[2] = {0, 0};  // bits of an Element without the sign
    CUTE_UNROLL
    for (int k = 0; k < kSteps16; ++k) {
      Words words;
      Step::load_q(q_rows, m, k, words);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t const in_low = words[i] & 0x7fffu, in_high = words[i] >> 16 & 0x7fffu;
        uint32_t const larger = in_low > in_high ? in_low : in_high;
        amax[i % 2] = larger > amax[i % 2] ? larger : amax[i % 2];
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      CUTE_UNROLL
      for (int mask = 1; mask < 4; mask *= 2) {
        uint32_t const other = Arch::shuffle_xor(amax[row], mask);
        amax[row] = other > amax[row] ? other : amax[row];
      }
      quantize::Factors const factors = quantize::factors_of(float_bits(low(amax[row])));
      (row == 0 ? scale : scale8) = factors.scale;
      inverse[row] = factors.inverse;
    }
  }
};

// Units (tile/units.hpp) of unconverted sums. Factors are positive, so that a
// masked -inf stays -inf, or NaN.
template <int kRows>
struct SumUnits {
  static constexpr bool kHasLimit = false;
  float factors[kRows];

  CUTE_DEVICE float factor(int i) const { return factors[i]; }
  CUTE_DEVICE float offset(int i, float row_max) const {
    return fmaf(factors[i], -quantize::kMagic, -row_max);
  }
  CUTE_DEVICE float exponent(int i, float sum, float offset, float) const {
    return fmaf(sum, factors[i], offset);
  }
  CUTE_DEVICE float in_log2(int i, float sum) const {
    return (sum - quantize::kMagic) * factors[i];
  }

  // Called before a mask is applied: moves NaN from the factors to the sums, where the mask
  // replaces it. A NaN factor times -inf would stay NaN.
  template <class S>
  CUTE_DEVICE void move_nan(S&& s) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      unpredicated_if(!(factors[i] < kInf), [&] {
        CUTE_UNROLL
        for (int j = 0; j < columns_of<decltype(s)>; ++j) s(i, j) = factors[i];
        factors[i] = 1.0f;
      });
    }
  }
};

}  // namespace cutlass_attn
