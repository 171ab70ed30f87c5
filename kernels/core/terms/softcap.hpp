// Softcap (Gemma 2): logit = softcap * tanh(softmax_scale * s / softcap).
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

// Without a cap, the logit is softmax_scale * s for a scale of either sign.
struct Softcap {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.logits.softcap != 0.0f; }

  // The value a * b + c, whose product has not been rounded: a fused multiply-add adds to it.
  struct Product {
    float a, b, c;
  };

  // unit * tanh(inner * s) of products s: an odd polynomial where |s| <= limit, instead of two
  // instructions on the special function unit and more. kCount: its coefficients; one more of them
  // takes one more instruction, and a larger limit. The relative error of either is at most 3e-6.
  // Without a cap the value is unit * inner * s.
  template <int kCount>
  struct Powers {
    static_assert(kCount == 4 || kCount == 5);
    static constexpr float kLargestAngle = kCount == 4 ? 0.625f : 0.9f;  // of tanh
    static constexpr float kLargestProduct = 1e18f;                      // with a finite square
    bool has_cap;
    float inner, unit, limit;
    float coefficients[kCount];  // of s, s^3, ...

    CA_HOST_DEVICE Powers(bool has_cap, float inner, float unit)
        : has_cap(has_cap),
          inner(inner),
          unit(unit),
          limit(has_cap ? fminf(kLargestAngle * fast_reciprocal(fabsf(inner)), kLargestProduct)
                        : kLargestProduct) {
      constexpr float kOfTanh[2][5] = {
          {0.999997079f, -0.333092302f, 0.130154595f, -0.0400295146f, 0.0f},
          {0.999997199f, -0.333156347f, 0.131513f, -0.047156889f, 0.0105086789f}};
      float power = unit * inner;
      CA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        coefficients[i] = has_cap ? power * kOfTanh[kCount - 4][i] : i == 0 ? power : 0.0f;
        power *= inner * inner;
      }
    }

    CA_HOST_DEVICE Product of_small(float s) const { return {s, slope(s * s), 0.0f}; }
    // A product's own size selects the formula, so that its bits do not depend on other products.
    // Beyond the limit, c leads from the polynomial at the limit to tanh: with selects between the
    // two the kernels have more local memory.
    CA_HOST_DEVICE Product of_any(float s) const {
      float const end = has_cap ? limit : kInf;
      float const a = fminf(fmaxf(s, -end), end), b = slope(has_cap ? a * a : 0.0f);
      float const c = fmaf(fast_tanh(s * inner), unit, -(a * b));
      return {a, b, a == s ? 0.0f : c};
    }

    // The values, rounded.
    CA_HOST_DEVICE float small(float s) const { return s * slope(s * s); }
    CA_HOST_DEVICE float any(float s) const {
      float const tanh = fast_tanh(s * inner) * unit;
      return fabsf(s) <= limit ? small(s) : tanh;
    }

   private:
    CA_HOST_DEVICE float slope(float square) const {
      float y = coefficients[kCount - 1];
      CA_UNROLL
      for (int i = kCount - 2; i >= 0; --i) y = fmaf(y, square, coefficients[i]);
      return y;
    }
  };
};

}  // namespace cutlass_attn
