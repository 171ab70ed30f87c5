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

// logit = softmax_scale * s, for softmax_scale > 0: nothing is left to do per element.
struct IdentityScore {
  static constexpr const char* kToken = "identity";
  float scale;

  CA_HOST_DEVICE explicit IdentityScore(AttnParams const& p) : scale(p.softmax_scale) {}

  CA_HOST_DEVICE static bool takes(AttnParams const& p) {
    return p.softcap == 0.0f && p.softmax_scale > 0.0f;
  }
  CA_HOST_DEVICE float log2_scale() const { return scale * kLog2e; }
  CA_HOST_DEVICE float operator()(float s, int, int, int, int) const { return s; }
  CA_HOST_DEVICE float grad(float, int, int, int, int) const { return scale; }
};

// logit = softcap * tanh(softmax_scale * s / softcap); with softcap = 0, softmax_scale * s for a
// scale of any sign.
struct SoftcapScore {
  static constexpr const char* kToken = "softcap";
  float cap;
  float inner;  // scale / cap, or the scale alone without a cap

  CA_HOST_DEVICE explicit SoftcapScore(AttnParams const& p)
      : cap(p.softcap), inner(p.softcap > 0.0f ? p.softmax_scale / p.softcap : p.softmax_scale) {}

  CA_HOST_DEVICE static bool takes(AttnParams const&) { return true; }
  CA_HOST_DEVICE float log2_scale() const { return kLog2e; }
  CA_HOST_DEVICE float operator()(float s, int, int, int, int) const {
    return cap > 0.0f ? cap * fast_tanh(s * inner) : s * inner;
  }
  CA_HOST_DEVICE float grad(float s, int, int, int, int) const {
    if (!(cap > 0.0f)) return inner;
    float const t = fast_tanh(s * inner);
    return (1.0f - t * t) * inner * cap;
  }
};

}  // namespace cutlass_attn
