// From the product s = q.k to the logit that softmax sees.
//
// Score<Terms...> is composed of the terms of a call; each has a file in core/terms/. An absent
// term costs nothing. A score maps s to x, such that the softmax weight is 2^(x * log2_scale())
// with log2_scale() > 0: the largest x is the largest logit.
//
//   no term     x = s; the scale goes into the fused multiply-add of the exponential
//   Softcap     x = tanh(s * inner); the cap goes into the exponential
//   additive    x = (s or tanh) * factor + term, in units of log2. The row max is then one of the
//   terms       x, not a rounded product: next to a bias of -1e9 a logit keeps its exact distance
//               from the row max.
//
// A score is made from a call and `factor`, a factor that the products lack if operands have
// scales: the scale in use is softmax_scale * factor. grad() is d logit / d s.
#pragma once

#include <type_traits>

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/opaque.hpp"
#include "core/problem.hpp"
#include "core/sequences.hpp"
#include "core/terms/alibi.hpp"
#include "core/terms/bias.hpp"
#include "core/terms/chunk.hpp"
#include "core/terms/mask_bits.hpp"
#include "core/terms/max_logit.hpp"
#include "core/terms/pairs.hpp"
#include "core/terms/score_mod.hpp"
#include "core/terms/softcap.hpp"

namespace cutlass_attn {

struct NoRows {};

template <class... Terms>
struct Score {
  template <class Term>
  static constexpr bool kHas = (std::is_same_v<Term, Terms> || ...);
  static constexpr bool kHasSoftcap = kHas<Softcap>, kHasBias = kHas<TileBias>;
  static constexpr bool kHasAlibi = kHas<Alibi>;
  // The user's function among the terms, applied after the others; void if there is none.
  using Mod = typename ScoreModOf<Terms...>::type;
  static constexpr bool kHasMod = !std::is_same_v<Mod, void>;
  // Whether tensors that it captures have gradients, and whether these depend on the score.
  static constexpr bool kHasModSums = ScoreModOf<Terms...>::kSums > 0;
  static constexpr bool kModSumsReadScore = ScoreModOf<Terms...>::kSumsReadScore;
  // Whether its derivative may be beyond float16.
  static constexpr bool kModIsSteep = ScoreModOf<Terms...>::kGradIsSteep;
  // Whether a term is added to logits.
  static constexpr bool kAdds = kHasAlibi || kHasBias || kHas<PairBias> || kHasMod;
  // Whether apply() does nothing. with_bias() adds a bias, so a bias alone counts as identity.
  static constexpr bool kIsIdentity = !kHas<Alibi> && !kHasMod && (kHasBias || !kHasSoftcap);
  static constexpr bool kIsGeneral = false;
  // Whether the code of a logit is long, so that a kernel had better have few copies of it.
  static constexpr bool kIsLong = kHasMod || (kHasSoftcap && !kHasBias);
  // Whether d logit / d(softmax_scale s) is 1.
  static constexpr bool kIsLinear = !kHasSoftcap && !kHasMod;
  static constexpr bool kHasChunks = kHas<Chunk>, kHasMask = kHas<MaskBits>;
  static constexpr bool kKeepsMaxLogit = kHas<MaxLogit>;
  // Whether products may keep their units where ALiBi is linear, and whether a softcap may join the
  // exponential: no other term comes in between.
  static constexpr bool kIsOneTerm = !kHasBias && !kHas<PairBias> && !kHasMod;
  static constexpr bool kIsLine = kHasAlibi && !kHasSoftcap && kIsOneTerm;
  static constexpr bool kIsCapped = kHasSoftcap && !kHasAlibi && kIsOneTerm;
  // Sinks are divided by the scale if the exponential applies it. A smaller scale than this could
  // make them overflow.
  static constexpr float kMinScale = 1e-30f;

  Problem const& p;
  float inner;  // factor of s, before the softcap
  float cap;    // 0: none

  CA_HOST_DEVICE explicit Score(Problem const& p, SeqLens = {}, float factor = 1.0f)
      : p(p), inner(inner_of(p, factor)), cap(kHasSoftcap ? p.logits.softcap : 0.0f) {}

  // Whether the kernel with this score can run the call: the score has every term of the call. A
  // kernel with a bias or a mask requires the call to have one. A score_mod joins the score when
  // the kernel is compiled; it adds to logits, so any scale is allowed.
  CA_HOST_DEVICE static bool can_run(Problem const& p) {
    return (kHasSoftcap || !Softcap::is_in(p)) && (kHasChunks || kHasMask || !Chunk::is_in(p)) &&
           (kHas<Alibi> || !Alibi::is_in(p)) &&
           (kHasBias || kHas<PairBias>) == TileBias::is_in(p) &&
           (kHasMask || kHas<PairMask>) == MaskBits::is_in(p) &&
           (kHasSoftcap || kAdds || p.logits.has_score_mod || p.logits.softmax_scale >= kMinScale);
  }

  CA_HOST_DEVICE float log2_scale() const {
    if constexpr (kAdds) return 1.0f;
    if constexpr (kHasSoftcap) return outer() * kLog2e;
    return inner * kLog2e;
  }

  // One product, of query q with key k. Only for scores without additive terms.
  CA_HOST_DEVICE float operator()(float s, int = 0, int = 0, int = 0, int = 0) const {
    static_assert(!kAdds);
    if constexpr (!kHasSoftcap) return s;
    return cap > 0.0f ? fast_tanh(s * inner) : s * inner;
  }
  CA_HOST_DEVICE float grad(float s, int, int, int, int) const {
    static_assert(!kAdds);
    if (!kHasSoftcap || !(cap > 0.0f)) return inner;
    float const t = fast_tanh(s * inner);
    return (1.0f - t * t) * inner * cap;
  }

  // What the terms keep per row, for kRows rows.
  template <int kRows>
  using Rows = std::conditional_t<kHas<Alibi>, Alibi::Rows<kRows>, NoRows>;
  template <int kRows, class Place>
  CA_HOST_DEVICE Rows<kRows> rows(Place const& place) const {
    return Alibi::rows<kRows>(p, place);
  }

  // read: Rows, or Alibi::KeyBlock<true>.
  template <int kRows, class Read, class Place>
  CA_HOST_DEVICE Alibi::Line<kRows> line(Read const& read, Place const& place) const {
    return Alibi::line<kRows>(read, inner, place);
  }

  // Makes logits grow with the products; powers() are those of such products, in units of log2. The
  // branch also keeps ptxas from mixing softmax with the code before it: sm90 d64 and d128 would
  // have 112 and 136 bytes of local memory instead of 40 and none.
  template <int kCount, class X>
  CA_HOST_DEVICE void make_inner_positive(X&& x) const {
    branch_if(inner < 0.0f, [&] {
      CA_UNROLL
      for (int i = 0; i < kCount; ++i) x(i) = -x(i);
    });
  }
  template <int kCount>
  CA_HOST_DEVICE Softcap::Powers<kCount> powers() const {
    return Softcap::Powers<kCount>(cap > 0.0f, fabsf(inner), outer() * kLog2e);
  }

  // Logits of `query` and later queries grow towards smaller keys from this key on. There, the row
  // max of larger keys is no upper bound.
  CA_HOST_DEVICE int32_t rising_from(SeqLens lens, int32_t query) const {
    return kHasAlibi ? Alibi::rising_from(p, lens, query) : INT32_MAX;
  }

  // Products x(i, j) of kRows rows with kKeys keys. rows: Rows<kRows>, or Alibi::KeyBlock for a
  // score with ALiBi. place: see the terms.
  template <int kRows, int kKeys, class Read, class X, class Place>
  CA_HOST_DEVICE void apply(Read const& rows, X&& x, Place const& place) const {
    if constexpr (kHasSoftcap && !kHasBias) {
      apply_softcap<typename std::decay_t<Place>::Machine, kRows * kKeys>(x);
    }
    float const factor = kHasSoftcap || kHasBias ? 1.0f : inner;
    if constexpr (kHas<Alibi>) Alibi::add<kRows, kKeys>(p, rows, x, factor, place);
    if constexpr (kHasMod) Mod::template apply<kRows, kKeys>(p, x, unit_of_mod(), place);
  }

  // What the terms keep per query head.
  using Head = std::conditional_t<kHas<Alibi>, Alibi::Head, NoRows>;
  CA_HOST_DEVICE Head head(SeqLens lens, int batch, int head) const {
    if constexpr (kHas<Alibi>) return Alibi::head_of(p, lens, batch, head);
    return Head{};
  }
  // Steps of a backward pass; each takes the x of the step before:
  //   apply_softcap<., false>()  x = tanh(s * inner); 1 - x^2 is d logit / d(scale s)
  //   add_alibi()                x(i, j) of kRows rows of one head with kKeys keys
  //   add_bias()                 one x
  template <int kRows, int kKeys, class X, class Place>
  CA_HOST_DEVICE void add_alibi(Head const& head, X&& x, Place const& place) const {
    Alibi::add_of_head<kRows, kKeys>(p, head, x, factor_of_terms(), place);
  }
  CA_HOST_DEVICE float add_bias(float x, float bias) const {
    return fmaf(bias, kLog2e, kHas<Alibi> ? x : x * factor_of_terms());
  }

  // Softcap of kCount products x(i). A call without a softcap jumps over it: that takes fewer
  // registers than a select, but the instructions do not mix with the code around it. kScales:
  // whether the result is in the units of the next terms.
  template <class Arch, int kCount, bool kScales = kAdds, class X>
  CA_HOST_DEVICE void apply_softcap(X&& x) const {
    float const unit = kScales ? cap * kLog2e : 1.0f;
    // Beside wgmma, exponentials bound a kernel. Products far below the cap, usually all of a
    // warp's, need none. ALiBi leaves no registers for two codes: d128 would have 72 bytes of local
    // memory.
    if constexpr (Arch::kHasWgmma && !kHas<Alibi>) {
      unpredicated_if(!(cap > 0.0f), [&] {
        CA_UNROLL
        for (int i = 0; i < kCount; ++i) x(i) *= inner;
      });
      unpredicated_if(cap > 0.0f, [&] {
        Softcap::Powers<4> const powers(true, inner, unit);
        float largest = 0.0f;
        CA_UNROLL
        for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(x(i)));
        int const are_small = !Arch::any(!(largest <= powers.limit));
        unpredicated_if(are_small, [&] {
          CA_UNROLL
          for (int i = 0; i < kCount; ++i) x(i) = powers.small(x(i));
        });
        unpredicated_if(!are_small, [&] {
          CA_UNROLL
          for (int i = 0; i < kCount; ++i) x(i) = powers.any(x(i));
        });
      });
    } else {
      CA_UNROLL
      for (int i = 0; i < kCount; ++i) x(i) *= inner;
      unpredicated_if(cap > 0.0f, [&] {
        CA_UNROLL
        for (int i = 0; i < kCount; ++i) x(i) = fast_tanh(x(i)) * unit;
      });
    }
  }

  // One product with softcap and bias: everything before the remaining terms.
  CA_HOST_DEVICE float with_bias(float s, float bias) const {
    float x = s * inner;
    if constexpr (kHasSoftcap) {
      if (cap > 0.0f) x = fast_tanh(x) * (cap * kLog2e);
    }
    return fmaf(bias, kLog2e, x);
  }

  // The user's function gets x times this.
  CA_HOST_DEVICE float unit_of_mod() const {
    return kHasSoftcap || kHasBias || kHasAlibi ? kLn2 : inner * kLn2;
  }

 private:
  // Factor from the result of apply_softcap<., false>() to units of log2. For scores with additive
  // terms.
  CA_HOST_DEVICE float factor_of_terms() const {
    return !kHasSoftcap ? inner : cap > 0.0f ? cap * kLog2e : 1.0f;
  }
  CA_HOST_DEVICE static float inner_of(Problem const& p, float factor) {
    float const scale = p.logits.softmax_scale;
    if (kHasSoftcap && p.logits.softcap > 0.0f) return scale / p.logits.softcap * factor;
    return kAdds ? scale * factor * kLog2e : scale * factor;
  }
  CA_HOST_DEVICE float outer() const { return cap > 0.0f ? cap : 1.0f; }
};

// A score with one more term.
template <class Score, class Term>
struct WithTerm;
template <class... Terms, class Term>
struct WithTerm<Score<Terms...>, Term> {
  using type = Score<Terms..., Term>;
};

using IdentityScore = Score<>;
using SoftcapScore = Score<Softcap>;

// The score for callers that multiply by log2_scale() before they subtract the row max. A general
// score is then in units of log2, for the reason given above.
template <class Score>
CA_HOST_DEVICE Score score_in_log2(Problem const& p, SeqLens lens, float factor = 1.0f) {
  if constexpr (Score::kIsGeneral) {
    return Score(p, lens, factor, kLog2e);
  } else {
    return Score(p, lens, factor);
  }
}

}  // namespace cutlass_attn
