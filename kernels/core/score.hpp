// Score functors: from the raw product q.k to the logit that softmax sees.
//
// A functor turns the product of query `q` with key `k` in (batch, head) into a value x such that
// the softmax weight is 2^(x * log2_scale()); log2_scale() > 0, so the largest x is the largest
// logit and scaling folds into the exponential's one fused multiply-add. grad() is d logit / d s,
// s being the raw product, for the backward pass.
//
// A new score: a functor here, its token in manifest.toml, a keyword in Python.
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/params.hpp"

namespace cutlass_attn {

// Whether anything is added to a logit, or hidden by a mask of bytes.
CA_HOST_DEVICE bool has_terms(AttnParams const& p) {
  return p.alibi_slopes != nullptr || p.bias.data != nullptr || p.mask.data != nullptr;
}

// logit = softmax_scale * s, for any positive scale in use: nothing is left to do per element.
struct IdentityScore {
  static constexpr const char* kToken = "identity";
  static constexpr bool kIsIdentity = true;
  static constexpr bool kIsGeneral = false;
  // Sinks are divided by the scale: below this one they could overflow.
  static constexpr float kLeastScale = 1e-30f;
  float scale;

  CA_HOST_DEVICE explicit IdentityScore(AttnParams const& p) : scale(p.softmax_scale) {}

  CA_HOST_DEVICE static bool takes(AttnParams const& p) {
    return !has_terms(p) && p.softcap == 0.0f && p.softmax_scale >= kLeastScale;
  }
  CA_HOST_DEVICE float log2_scale() const { return scale * kLog2e; }
  CA_HOST_DEVICE float operator()(float s, int, int, int, int) const { return s; }
  CA_HOST_DEVICE float grad(float, int, int, int, int) const { return scale; }
};

// logit = softcap * tanh(softmax_scale * s / softcap); with softcap = 0, softmax_scale * s for a
// scale of any sign. The factor in front is left to the exponential.
struct SoftcapScore {
  static constexpr const char* kToken = "softcap";
  static constexpr bool kIsIdentity = false;
  static constexpr bool kIsGeneral = false;
  float cap;
  float inner;  // scale / cap, or the scale alone without a cap

  CA_HOST_DEVICE explicit SoftcapScore(AttnParams const& p)
      : cap(p.softcap), inner(p.softcap > 0.0f ? p.softmax_scale / p.softcap : p.softmax_scale) {}

  CA_HOST_DEVICE static bool takes(AttnParams const& p) { return !has_terms(p); }
  CA_HOST_DEVICE float outer() const { return cap > 0.0f ? cap : 1.0f; }
  CA_HOST_DEVICE float log2_scale() const { return outer() * kLog2e; }
  CA_HOST_DEVICE float operator()(float s, int, int, int, int) const {
    return cap > 0.0f ? fast_tanh(s * inner) : s * inner;
  }
  CA_HOST_DEVICE float grad(float s, int, int, int, int) const {
    if (!(cap > 0.0f)) return inner;
    float const t = fast_tanh(s * inner);
    return (1.0f - t * t) * inner * cap;
  }
};

// The above, then - slope * |distance from the diagonal| (ALiBi, arXiv 2108.12409), the bias, and
// -inf where the mask of bytes hides the key. Reads bias and mask for every logit by itself.
struct GeneralScore {
  static constexpr const char* kToken = "general";
  static constexpr bool kIsIdentity = false;
  static constexpr bool kIsGeneral = true;
  AttnParams const& p;
  SoftcapScore capped;
  float diagonal;  // of query 0

  CA_HOST_DEVICE explicit GeneralScore(AttnParams const& params)
      : p(params),
        capped(params),
        diagonal(float(int64_t(p.seqlen_k) - p.seqlen_q + p.diagonal_shift)) {}

  CA_HOST_DEVICE static bool takes(AttnParams const&) { return true; }
  CA_HOST_DEVICE float log2_scale() const { return kLog2e; }
  CA_HOST_DEVICE float operator()(float s, int b, int h, int q, int k) const {
    float x = capped.outer() * capped(s, b, h, q, k);
    // Keys and queries beyond the sequences have no bias and no mask; their logits go unused.
    if (q >= p.seqlen_q || k >= p.seqlen_k) return x;
    if (p.alibi_slopes) {
      x -= p.alibi_slopes[b * p.alibi_batch_stride + h] * fabsf(float(k - q) - diagonal);
    }
    if (p.bias.data) x += bias(at(p.bias, b, h, q, k));
    if (p.mask.data && static_cast<uint8_t const*>(p.mask.data)[at(p.mask, b, h, q, k)] == 0) {
      x = -kInf;
    }
    return x;
  }
  CA_HOST_DEVICE float grad(float s, int b, int h, int q, int k) const {
    return capped.grad(s, b, h, q, k);
  }

 private:
  CA_HOST_DEVICE static int64_t at(LogitRef const& t, int b, int h, int q, int k) {
    return b * t.batch_stride + h * t.head_stride + q * t.row_stride + k * t.key_stride;
  }
  CA_HOST_DEVICE float bias(int64_t at) const {
    switch (p.bias_dtype) {
      case DType::kFloat16:
        return half_to_float(static_cast<uint16_t const*>(p.bias.data)[at]);
      case DType::kBFloat16:
        return bfloat16_to_float(static_cast<uint16_t const*>(p.bias.data)[at]);
      case DType::kFloat32:
        break;
    }
    return static_cast<float const*>(p.bias.data)[at];
  }
};

}  // namespace cutlass_attn
