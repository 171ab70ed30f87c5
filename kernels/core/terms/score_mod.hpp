// A user's score_mod: a function written by cutlass_attn/_mods/cpp.py and compiled with the kernel
// at first use.
//
// Its operands are not in Problem, which every kernel has. They lie behind the parameters of the
// kernel that has the function, in one struct:
//
//   struct Mod {
//     ...                                                        // captured tensors, numbers
//     float score(float score, int b, int h, int q, int k) const;  // the logit
//     float grad(float score, int b, int h, int q, int k) const;   // d logit / d score
//     static constexpr bool kGradIsSteep = ...;  // whether grad() may be beyond float16
//     // In a backward kernel: number of elements of captured tensors that have gradients.
//     static constexpr int kSums = ...;
//     // false: grad() is 1, and neither slope() nor sum() depends on the score
//     static constexpr bool kSumsReadScore = ...;
//   };
//
// If there are such elements, it also has
//
//     enum Spread { kEach, kPerHead, kPerQuery, kPerKey, kPerDistance };
//     static constexpr Spread kSpread[kSums] = ...;   // which logits of a head have one sum()
//     template <int> struct Nth {};
//     float slope(Nth<j>, float score, int b, int h, int q, int k) const;  // d logit / d element
//     float* sum(Nth<j>, float score, int b, int h, int q, int k) const;   // its gradient, in fp32
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

template <class Params, class Mod>
struct WithScoreMod {
  Params params;
  Mod mod;
};

namespace detail {
template <class Params>
CA_HOST_DEVICE auto problem_of(Params const& params, int) -> decltype((params.problem)) {
  return params.problem;
}
template <class Params>
CA_HOST_DEVICE auto problem_of(Params const& params, long) -> decltype((params.forward.problem)) {
  return params.forward.problem;
}
// Offset of the problem in a kernel's parameters. Written by hand: NVRTC has no offsetof for
// classes with bases.
template <class Params>
CA_HOST_DEVICE int64_t problem_offset() {
  constexpr uint64_t kAnywhere = 4096;
  auto const& params = *reinterpret_cast<Params const*>(kAnywhere);
  return int64_t(reinterpret_cast<uint64_t>(&problem_of(params, 0)) - kAnywhere);
}
}  // namespace detail

// Mod: as above. Params: parameters of the kernel.
template <class Mod, class Params>
struct ScoreMod {
  using Function = Mod;
  static constexpr int kSums = Mod::kSums;
  static constexpr bool kSumsReadScore = Mod::kSumsReadScore;
  static constexpr bool kGradIsSteep = Mod::kGradIsSteep;

  // p: must be the one in the kernel's parameters, not a copy.
  CA_HOST_DEVICE static Mod const& of(Problem const& p) {
    char const* const params = reinterpret_cast<char const*>(&p) - detail::problem_offset<Params>();
    return reinterpret_cast<WithScoreMod<Params, Mod> const*>(params)->mod;
  }

  // x(i, j) = score_mod(x(i, j) * unit), in units of log2.
  //   place: batch(), head(i), query(i), key(j) of x
  template <int kRows, int kKeys, class X, class Place>
  CA_HOST_DEVICE static void apply(Problem const& p, X&& x, float unit, Place const& place) {
    Mod const& mod = of(p);
    int const batch = place.batch();
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const head = place.head(i), query = place.query(i);
      CA_UNROLL
      for (int j = 0; j < kKeys; ++j) {
        x(i, j) = mod.score(x(i, j) * unit, batch, head, query, place.key(j)) * kLog2e;
      }
    }
  }
  // As above, and calls set_slope(i, j, .) with d logit / d score.
  template <int kRows, int kKeys, class X, class Place, class SetSlope>
  CA_HOST_DEVICE static void apply(Problem const& p, X&& x, float unit, Place const& place,
                                   SetSlope&& set_slope) {
    Mod const& mod = of(p);
    int const batch = place.batch();
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const head = place.head(i), query = place.query(i);
      CA_UNROLL
      for (int j = 0; j < kKeys; ++j) {
        float const score = x(i, j) * unit;
        set_slope(i, j, mod.grad(score, batch, head, query, place.key(j)));
        x(i, j) = mod.score(score, batch, head, query, place.key(j)) * kLog2e;
      }
    }
  }
};

// The score_mod among the terms; void if there is none.
template <class... Terms>
struct ScoreModOf {
  using type = void;
  static constexpr int kSums = 0;
  static constexpr bool kSumsReadScore = false, kGradIsSteep = false;
};
template <class Mod, class Params, class... Terms>
struct ScoreModOf<ScoreMod<Mod, Params>, Terms...> : ScoreMod<Mod, Params> {
  using type = ScoreMod<Mod, Params>;
};
template <class Term, class... Terms>
struct ScoreModOf<Term, Terms...> : ScoreModOf<Terms...> {};

}  // namespace cutlass_attn
