// Score functors: from the raw product q.k to the logit that softmax sees.
//
// A functor turns the product of query `q` with key `k` in (batch, head) into a value x such that
// the softmax weight is 2^(x * log2_scale()); log2_scale() > 0, so the largest x is the largest
// logit and scaling folds into the exponential's one fused multiply-add. grad() is d logit / d s,
// s being the raw product, for the backward pass. Those that are not general look at the product
// alone, and take it alone.
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
  CA_HOST_DEVICE float operator()(float s, int = 0, int = 0, int = 0, int = 0) const { return s; }
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
  CA_HOST_DEVICE float operator()(float s, int = 0, int = 0, int = 0, int = 0) const {
    return cap > 0.0f ? fast_tanh(s * inner) : s * inner;
  }
  CA_HOST_DEVICE float grad(float s, int, int, int, int) const {
    if (!(cap > 0.0f)) return inner;
    float const t = fast_tanh(s * inner);
    return (1.0f - t * t) * inner * cap;
  }
};

// The above, then - slope * |distance from the diagonal| (ALiBi, arXiv 2108.12409), the bias, and
// -inf where the mask of bytes hides the key.
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
    One const one{s};
    apply<1, 1>(one, b, [&](int) { return h; }, [&](int) { return q; }, [&](int) { return k; });
    return s;
  }
  CA_HOST_DEVICE float grad(float s, int b, int h, int q, int k) const {
    return capped.grad(s, b, h, q, k);
  }

  // The same for the products x(i, j) of some rows, row i being query(i) of head(i), with key(j):
  // one term after the other for all of them, so that what a call has not is skipped at once, and
  // loads do not wait for each other. What lies beyond the sequences gets the terms of the last
  // query or key and goes unused.
  template <int kRows, int kKeys, class X, class Head, class Query, class Key>
  CA_HOST_DEVICE void apply(X&& x, int b, Head&& head, Query&& query, Key&& key) const {
    branch(capped.cap > 0.0f, [&] {
      for_all<kRows, kKeys>([&](int i, int j) { x(i, j) = fast_tanh(x(i, j) * capped.inner); });
    });
    float const factor = capped.cap > 0.0f ? capped.cap : capped.inner;
    for_all<kRows, kKeys>([&](int i, int j) { x(i, j) *= factor; });
    branch(p.alibi_slopes != nullptr, [&] {
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const slope = p.alibi_slopes[b * p.alibi_batch_stride + head(i)];
        int const q = query(i);
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) x(i, j) -= slope * fabsf(float(key(j) - q) - diagonal);
      }
    });
    branch(p.bias.data && p.bias_dtype == DType::kFloat32, [&] {
      for_entries<kRows, kKeys, float>(p.bias, b, head, query, key,
                                       [&](int i, int j, float entry) { x(i, j) += entry; });
    });
    branch(p.bias.data && p.bias_dtype != DType::kFloat32, [&] {
      bool const is_half = p.bias_dtype == DType::kFloat16;
      for_entries<kRows, kKeys, uint16_t>(
          p.bias, b, head, query, key, [&](int i, int j, uint16_t entry) {
            x(i, j) += is_half ? half_to_float(entry) : bfloat16_to_float(entry);
          });
    });
    branch(p.mask.data, [&] {
      for_entries<kRows, kKeys, uint8_t>(
          p.mask, b, head, query, key,
          [&](int i, int j, uint8_t entry) { x(i, j) = entry == 0 ? -kInf : x(i, j); });
    });
  }

 private:
  struct One {
    float& x;
    CA_HOST_DEVICE float& operator()(int, int) const { return x; }
  };

  template <int kRows, int kKeys, class Visit>
  CA_HOST_DEVICE static void for_all(Visit&& visit) {
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CA_UNROLL
      for (int j = 0; j < kKeys; ++j) visit(i, j);
    }
  }

  // Calls visit(i, j, entry) for the entries of all rows with all keys, after it has read them.
  template <int kRows, int kKeys, class Entry, class Head, class Query, class Key, class Visit>
  CA_HOST_DEVICE void for_entries(LogitRef const& t, int b, Head&& head, Query&& query, Key&& key,
                                  Visit&& visit) const {
    Entry entries[kRows][kKeys];
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      auto const* const row = static_cast<Entry const*>(t.data) + b * t.batch_stride +
                              head(i) * t.head_stride +
                              clamped(query(i), p.seqlen_q) * t.row_stride;
      CA_UNROLL
      for (int j = 0; j < kKeys; ++j) {
        entries[i][j] = row[clamped(key(j), p.seqlen_k) * t.key_stride];
      }
    }
    for_all<kRows, kKeys>([&](int i, int j) { visit(i, j, entries[i][j]); });
  }
  CA_HOST_DEVICE static int clamped(int i, int end) { return i < end ? i : end - 1; }
};

}  // namespace cutlass_attn
