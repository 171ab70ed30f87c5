// Gradients of tensors that a user's score_mod captures: for each logit its gradient times the
// derivative with respect to the element, added in fp32 by atomics, in any order. The caller has
// zeroed the sums.
#pragma once

#include "tile/backward_scores.hpp"

namespace cutlass_attn {

// The sums of a slice. Logits that read one element are added up first, in the thread and over the
// lanes that share it, where the function's text shows that they do (Mod::kSpread).
template <class Scores>
struct CapturedSums {
  using Arch = typename Scores::Machine;
  using Slice = typename Scores::Slice;
  using Mod = typename Scores::ScoreMod::Function;
  template <int j>
  using Nth = typename Mod::template Nth<j>;
  static constexpr int kKeyBlocks = Scores::kKeyBlocks, kQueryColumns = Scores::kQueryColumns;

  Scores const& scores;
  Mod const& mod;
  typename Scores::Kept const& products;  // S
  Slice const& grad;                      // of the logits, 0 where masked
  StepPlace const& at;
  int const slice, lane;

  CUTE_DEVICE void add() const { add_from<0>(); }

 private:
  template <int j>
  CUTE_DEVICE void add_from() const {
    if constexpr (j < Mod::kSums) {
      constexpr auto kSpread = Mod::kSpread[j];
      if constexpr (kSpread == Mod::kPerHead) add_per_head<j>();
      if constexpr (kSpread == Mod::kPerQuery) add_per_query<j>();
      if constexpr (kSpread == Mod::kPerKey) add_per_key<j>();
      if constexpr (kSpread == Mod::kPerDistance) add_per_distance<j>();
      if constexpr (kSpread == Mod::kEach) add_each<j>();
      add_from<j + 1>();
    }
  }

  CUTE_DEVICE SlicePlace place() const { return {lane}; }
  CUTE_DEVICE int first_query() const { return at.first_query + slice * kQueryColumns * 8; }
  CUTE_DEVICE int query(int n, int i) const { return first_query() + place().query(n, i); }
  CUTE_DEVICE int key(int m, int i) const { return at.first_key + place().key(m, i); }
  CUTE_DEVICE float score(int m, int n, int i) const {
    if constexpr (Scores::kKeepsProducts) {
      return products(i, m, n) * scores.score.unit_of_mod();
    } else {
      return 0.0f;
    }
  }

  // The gradient by way of one logit. 0 if the logit has none: the slope may be infinite.
  template <int j>
  CUTE_DEVICE float term(int m, int n, int i) const {
    float const of_logit = grad(i, m, n);
    return of_logit == 0.0f ? 0.0f
                            : of_logit * mod.slope(Nth<j>{}, score(m, n, i), at.batch, at.head,
                                                   query(n, i), key(m, i));
  }
  template <int j>
  CUTE_DEVICE void add_to(float x, int query, int key, float score = 0.0f) const {
    if (x != 0.0f) Arch::red_add(mod.sum(Nth<j>{}, score, at.batch, at.head, query, key), x);
  }

  template <int j>
  CUTE_DEVICE void add_each() const {
    Scores::for_all([&](int m, int n, int i) {
      add_to<j>(term<j>(m, n, i), query(n, i), key(m, i), score(m, n, i));
    });
  }
  template <int j>
  CUTE_DEVICE void add_per_head() const {
    float total = 0.0f;
    Scores::for_all([&](int m, int n, int i) { total += term<j>(m, n, i); });
    CUTE_UNROLL
    for (int lanes = 1; lanes < 32; lanes *= 2) total += Arch::shuffle_xor(total, lanes);
    if (lane == 0) add_to<j>(total, 0, 0);
  }
  template <int j>
  CUTE_DEVICE void add_per_query() const {
    CUTE_UNROLL
    for (int n = 0; n < kQueryColumns; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        float total = 0.0f;
        CUTE_UNROLL
        for (int m = 0; m < kKeyBlocks; ++m) total += term<j>(m, n, i) + term<j>(m, n, i + 2);
        CUTE_UNROLL
        for (int lanes = 4; lanes < 32; lanes *= 2) total += Arch::shuffle_xor(total, lanes);
        if (lane / 4 == 0) add_to<j>(total, query(n, i), 0);
      }
    }
  }
  template <int j>
  CUTE_DEVICE void add_per_key() const {
    CUTE_UNROLL
    for (int m = 0; m < kKeyBlocks; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; i += 2) {
        float total = 0.0f;
        CUTE_UNROLL
        for (int n = 0; n < kQueryColumns; ++n) total += term<j>(m, n, i) + term<j>(m, n, i + 1);
        total += Arch::shuffle_xor(total, 1);
        total += Arch::shuffle_xor(total, 2);
        if (lane % 4 == 0) add_to<j>(total, 0, key(m, i));
      }
    }
  }

  // Sums over the diagonals of a slice. Element (m, n, i) of lane 4 g + t has
  //
  //   query - key = 8 c + 2 t + i % 2 - g,   c = n - (2 m + i / 2)
  //
  // With 2 t - g = 8 w + e, 0 <= e < 8, the four lanes with equal e add up their sums of c + w, and
  // the sums of odd queries of e - 1. Then each of them adds a quarter of the diagonals to memory:
  // an atomic of the warp has 32 neighbouring distances. That is 3 atomics where there were 32.
  template <int j>
  CUTE_DEVICE void add_per_distance() const {
    constexpr int kRows = 2 * kKeyBlocks, kSums = kQueryColumns + kRows - 1;  // values of c
    float own[2][kSums] = {};
    Scores::for_all([&](int m, int n, int i) {
      own[i % 2][n - (2 * m + i / 2) + kRows - 1] += term<j>(m, n, i);
    });
    int const g = lane / 4, t = lane % 4, e = (2 * t - g) & 7;
    bool const is_below = 2 * t < g;  // w = -1
    auto const lane_of = [](int e, int t) { return ((2 * t - e) & 7) * 4 + (t & 3); };

    float total[2][kSums + 1];  // index: c + w + kRows
    CUTE_UNROLL
    for (int x = 0; x <= kSums; ++x) {
      CUTE_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        float const above = x > 0 ? own[odd][x > 0 ? x - 1 : 0] : 0.0f;
        float const below = x < kSums ? own[odd][x < kSums ? x : 0] : 0.0f;
        float sum = is_below ? below : above;
        sum += Arch::shuffle(sum, lane_of(e, t + 1));
        total[odd][x] = sum + Arch::shuffle(sum, lane_of(e, t + 2));
      }
    }
    constexpr int kDiagonals = kSums + 2;
    float diagonal[(kDiagonals + 3) / 4 * 4] = {};  // query - key = 8 (index - kRows) + e
    CUTE_UNROLL
    for (int x = 0; x <= kSums; ++x) {
      float const odd = Arch::shuffle(total[1][x], lane_of(e - 1, t));
      diagonal[x] += total[0][x] + (e == 0 ? 0.0f : odd);
      diagonal[x + 1] += e == 0 ? odd : 0.0f;
    }
    CUTE_UNROLL
    for (int x = 0; x < kDiagonals; x += 4) {
      float const even = t == 2 ? diagonal[x + 2] : diagonal[x];
      float const odd = t == 3 ? diagonal[x + 3] : diagonal[x + 1];
      add_to<j>(t % 2 ? odd : even, first_query() + 8 * (x + t - kRows) + e, at.first_key);
    }
  }
};

// Adds the gradients of a slice: before Scores::gradient(), from dP and P, if they depend on the
// score. Else after it: the function adds terms to S, so gradient() has made dP the gradient of the
// logits, and no copy of dP is needed.
//   dp:        dP; after gradient() P (dP - delta)
//   weights:   P as rounded for dV
//   saved:     the argument of gradient()
//   products:  S, if Scores keeps it
template <class Scores>
struct CapturedGrads {
  using Slice = typename Scores::Slice;
  using Packed = typename Scores::Packed;

  Scores const& scores;
  StepPlace const at;
  int const slice, lane;

  CUTE_DEVICE void add_before(Slice const& dp, Packed const& weights,
                              typename Scores::Kept const& products,
                              typename Scores::Address stats) const {
    if constexpr (Scores::kKeepsProducts) {
      Slice grad = dp;
      scores.softmax_grad(grad, weights, stats, lane);
      add(grad, weights, products);
    }
  }
  CUTE_DEVICE void add_after(Slice& dp, typename Scores::SavedWeights const& saved) const {
    if constexpr (Scores::kHasCaptures && !Scores::kKeepsProducts) add(dp, saved.products, {});
  }

 private:
  CUTE_DEVICE void add(Slice& grad, Packed const& weights,
                       typename Scores::Kept const& products) const {
    // dP may be NaN where a key is masked. Zeros of bfloat16 and of float16 have the same bits.
    Scores::for_all([&](int m, int n, int i) {
      if (Scores::element_of(weights, m, n, i) == 0.0f) grad(i, m, n) = 0.0f;
    });
    CapturedSums<Scores>{scores, Scores::ScoreMod::of(scores.p), products, grad, at, slice, lane}
        .add();
  }
};

}  // namespace cutlass_attn
