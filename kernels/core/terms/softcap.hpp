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

  // unit * tanh(inner * s) of products s: an odd polynomial where |s| <= limit, four instructions
  // instead of two on the special function unit and more. Its relative error is at most 1.3e-5.
  // For a logit below 0.45 * softcap, where it is used, that is less than the rounding of its
  // weight to fp16. Without a cap the value is unit * inner * s.
  struct Powers {
    static constexpr float kLargestAngle = 0.45f;
    static constexpr float kLargestProduct = 1e18f;  // with a finite square
    bool has_cap;
    float inner, unit, limit;
    float of_1, of_3, of_5;  // coefficients of s, s^3, s^5

    CA_HOST_DEVICE Powers(bool has_cap, float inner, float unit)
        : has_cap(has_cap),
          inner(inner),
          unit(unit),
          limit(has_cap ? fminf(kLargestAngle * fast_reciprocal(fabsf(inner)), kLargestProduct)
                        : kLargestProduct),
          of_1(unit * inner * (has_cap ? 0.99998766f : 1.0f)),
          of_3(has_cap ? unit * inner * (inner * inner) * -0.33222705f : 0.0f),
          of_5(has_cap ? unit * inner * (inner * inner) * (inner * inner) * 0.11835345f : 0.0f) {}

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

   private:
    CA_HOST_DEVICE float slope(float square) const {
      return fmaf(fmaf(of_5, square, of_3), square, of_1);
    }
  };
};

}  // namespace cutlass_attn
