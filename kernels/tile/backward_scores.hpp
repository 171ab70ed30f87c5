// From the products of a slice to P and dS: score_mod, mask and dropout, on fragments whose rows
// are keys.
#pragma once

#include "core/dropout.hpp"
#include "core/math.hpp"
#include "core/opaque.hpp"
#include "core/score.hpp"
#include "tile/backward_products.hpp"
#include "tile/dropout.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn {

// Key and query of element i of block (m, n) of a slice, relative to the warp's first key and the
// slice's first query.
struct SlicePlace {
  int lane;
  CUTE_DEVICE int key(int m, int i) const { return m * 16 + i / 2 * 8 + lane / 4; }
  CUTE_DEVICE int query(int n, int i) const { return n * 8 + lane % 4 * 2 + i % 2; }
};

// Position of a step.
struct StepPlace {
  int batch, head;
  int first_key;    // of the warp
  int first_query;  // of the step
};

// Entries of a bias or a mask for a slice. A word has two entries: neighbouring keys, as in memory,
// and after transpose() neighbouring queries.
template <int kQueryColumns, int kKeyBlocks>
struct PairEntries {
  uint32_t words[kQueryColumns][kKeyBlocks][2];

  // Reads this lane's rows from `query` on and keys from `key` on. Positions beyond the sequences
  // are clamped, and get the entry of another query or key.
  template <class Entry>
  CUTE_DEVICE void read(PerLogit const& t, int batch, int head, int query, int key, SeqLens lens) {
    struct alignas(2 * sizeof(Entry)) Pair {
      Entry entry[2];
    };
    Entry const* const of_head =
        static_cast<Entry const*>(t.data) + batch * t.batch_stride + head * t.head_stride;
    CUTE_UNROLL
    for (int n = 0; n < kQueryColumns; ++n) {
      int const row = query + n * 8 < lens.q ? query + n * 8 : lens.q - 1;
      Entry const* const of_row = of_head + row * t.row_stride;
      CUTE_UNROLL
      for (int m = 0; m < kKeyBlocks; ++m) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          int const at = key + m * 16 + half * 8;
          Pair const pair = *reinterpret_cast<Pair const*>(of_row + (at < lens.k ? at : 0));
          words[n][m][half] = pair.entry[0] | uint32_t(pair.entry[1]) << 16;
        }
      }
    }
  }
  template <class Arch>
  CUTE_DEVICE void transpose() {
    CUTE_UNROLL
    for (int n = 0; n < kQueryColumns; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < kKeyBlocks; ++m) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half)
          words[n][m][half] = Arch::movmatrix_trans(words[n][m][half]);
      }
    }
  }
  CUTE_DEVICE uint16_t operator()(int m, int n, int i) const {
    return uint16_t(words[n][m][i / 2] >> i % 2 * 16);
  }
};

template <class Score, class Term>
constexpr bool kHasTerm = false;
template <class Term, class... Terms>
constexpr bool kHasTerm<Score<Terms...>, Term> = Score<Terms...>::template kHas<Term>;

// Whether the score is a softcap without, or with, a term that adds to its logits.
template <class Score>
constexpr bool kIsSoftcapAlone = false;
template <class... Terms>
constexpr bool kIsSoftcapAlone<Score<Terms...>> =
    Score<Terms...>::kHasSoftcap && !Score<Terms...>::kAdds;
template <class Score>
constexpr bool kAddsToSoftcap = false;
template <class... Terms>
constexpr bool kAddsToSoftcap<Score<Terms...>> =
    Score<Terms...>::kHasSoftcap && Score<Terms...>::kAdds;

template <class Config, class Score, class Arch>
struct BackwardScores {
  using Machine = Arch;
  using Products = BackwardProducts<Config, Arch>;
  using Slice = typename Products::Slice;
  using Packed = typename Products::Packed;
  using Address = typename Arch::SmemAddress;
  using Element = typename Config::Element;
  static constexpr int kKeyBlocks = Config::kKeyBlocks, kQueryColumns = Config::kSlice / 8;

  // Passed from weights() to gradient(): P d logit / d(scale s), and, if the logits need gradients
  // (of a bias), P. The sign bit marks a weight that dropout dropped. Products are bfloat16 if a
  // steep score_mod can take them beyond float16. That happens at weights near 1, where dP - delta
  // is small, so that dS fits.
  using Product = std::conditional_t<Score::kModIsSteep, cutlass::bfloat16_t, Element>;
  struct OfProducts {
    Packed products;
  };
  struct OfLogits : OfProducts {
    Packed logits;
  };
  using SavedWeights =
      std::conditional_t<Config::kHasBiasGrad && !Score::kIsLinear, OfLogits, OfProducts>;

  // For gradients of tensors that a score_mod captures (backward_captures.hpp): S of a slice, if
  // they depend on it.
  using ScoreMod = typename Score::Mod;
  static constexpr bool kHasCaptures = Score::kHasModSums;
  static constexpr bool kKeepsProducts = Score::kModSumsReadScore;
  struct NotKept {};
  using Kept = std::conditional_t<kKeepsProducts, Slice, NotKept>;
  CUTE_DEVICE static void keep(Slice const& x, Kept& kept) {
    if constexpr (kKeepsProducts) kept = x;
  }

  // Entries of a slice's logits, read from memory.
  static constexpr bool kHasBias = kHasTerm<Score, PairBias>, kHasMask = kHasTerm<Score, PairMask>;
  using Pairs = PairEntries<kQueryColumns, kKeyBlocks>;
  struct NoPairs {};
  struct Entries {
    std::conditional_t<kHasBias, Pairs, NoPairs> bias;
    std::conditional_t<kHasMask, Pairs, NoPairs> mask;

    CUTE_DEVICE void transpose() {
      if constexpr (kHasBias) bias.template transpose<Arch>();
      if constexpr (kHasMask) mask.template transpose<Arch>();
    }
  };

  Problem const& p;
  Score const score;
  float const log2_scale;
  DropoutMask const& dropout;

  template <class From = Element>
  CUTE_DEVICE static float element_of(Packed const& words, int m, int n, int i) {
    uint32_t const word = words[n / 2][m][n % 2 * 2 + i / 2];
    return element_to_float<From>(uint16_t(i % 2 ? word >> 16 : word));
  }

  // Calls visit(m, n, i) for all elements of a slice.
  template <class Visit>
  CUTE_DEVICE static void for_all(Visit&& visit) {
    CUTE_UNROLL
    for (int n = 0; n < kQueryColumns; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < kKeyBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) visit(m, n, i);
      }
    }
  }

  // Loads the entries that weights() uses. Called before the products, to hide the latency.
  CUTE_DEVICE Entries read_entries(StepPlace const& at, SeqLens lens, int slice, int lane) const {
    Entries entries = {};
    int const query = at.first_query + slice * Config::kSlice + lane / 4;
    int const key = at.first_key + lane % 4 * 2;
    if constexpr (kHasBias) {
      entries.bias.template read<uint16_t>(p.logits.bias, at.batch, at.head, query, key, lens);
    }
    if constexpr (kHasMask) {
      entries.mask.template read<uint8_t>(p.mask.elements, at.batch, at.head, query, key, lens);
    }
    return entries;
  }

  // From products of a slice to P = exp(logit - LSE), rounded.
  //   lens:       of the batch entry
  //   entries:    the result of read_entries()
  //   words:      P for dV, after dropout; the factor of kept weights is applied later
  //   saved:      the result for gradient()
  //   stats:      statistics of the slice's first query in shared memory
  //   queries:    queries_of_key from the warp's first key on
  //   is_masked:  whether any element is masked
  //   extra:      add_bias() adds the bias of a TileBias term; apply_bits() applies the bits of a
  //               MaskBits term; keep(n, saved) is called when `saved` has the n-th 16 queries
  struct NoExtra {
    CUTE_DEVICE void apply_bits(Slice&) const {}
    CUTE_DEVICE void keep(int, SavedWeights const&) const {}
  };
  template <class Extra = NoExtra>
  CUTE_DEVICE void weights(Slice& x, StepPlace const& at, SeqLens lens, int slice, Entries entries,
                           Address stats, Address queries, bool is_masked, int lane, Packed& words,
                           SavedWeights& saved, Extra const& extra = {}) const {
    Slice slope;
    if constexpr (Config::kIsGeneral) {
      apply_general(x, slope, at, slice, lane);
    } else {
      if constexpr (Score::kHasSoftcap) {
        score.template apply_softcap<Arch, Slice::kSize, false>(x);
        if constexpr (kAddsToSoftcap<Score>) {  // slopes are kept, rounded, for the other terms
          for_all([&](int m, int n, int i) { slope(i, m, n) = slope_of_softcap(x(i, m, n)); });
          Products::pack(slope, saved.products);
        }
      }
      entries.transpose();
      apply_terms(x, at, lens, slice, entries, lane);
      if constexpr (Score::kHasBias) extra.add_bias(score, x);
      if constexpr (Score::kHasMod) apply_mod(x, slope, at, slice, lane);
    }
    if constexpr (kHasTerm<Score, MaskBits>) {  // the bits include the interval
      extra.apply_bits(x);
    } else {
      unpredicated_if(is_masked, [&] { apply_mask(x, at, slice, queries, lane); });
    }
    CUTE_UNROLL
    for (int n = 0; n < Config::kSlice / 16; ++n) {
      for_queries(n, stats, lane, [&](int m, int n, int i, float (&stat)[2]) {
        // x is still the tanh. Computed this late, its slope takes few registers.
        if constexpr (kIsSoftcapAlone<Score>) slope(i, m, n) = slope_of_softcap(x(i, m, n));
        if constexpr (kAddsToSoftcap<Score>) slope(i, m, n) = element_of(saved.products, m, n, i);
        x(i, m, n) = fast_exp2(fmaf(x(i, m, n), log2_scale, stat[0]));
        if constexpr (!Score::kIsLinear) {
          // If a weight is 0, the slope may be infinite: of a user's function, or of a masked key.
          bool const is_none = (Score::kHasMod || kIsSoftcapAlone<Score>) && x(i, m, n) == 0.0f;
          slope(i, m, n) = is_none ? 0.0f : slope(i, m, n) * x(i, m, n);
        }
      });
      Products::pack(x, n, words);
      Products::template pack<Product>(Score::kIsLinear ? x : slope, n, saved.products);
      if constexpr (std::is_same_v<SavedWeights, OfLogits>) Products::pack(x, n, saved.logits);
      if constexpr (Config::kDrops) drop(at, slice, lane, n, words, saved);
      extra.keep(n, saved);
    }
    if constexpr (Config::kMayDrop && !Config::kDrops) {
      unpredicated_if(dropout.is_active(), [&] {
        CUTE_UNROLL
        for (int n = 0; n < Config::kSlice / 16; ++n) drop(at, slice, lane, n, words, saved);
      });
    }
  }

  // From dP of a slice to dS / scale = P d logit / d(scale s) (dP - delta), rounded.
  CUTE_DEVICE void gradient(Slice& dp, SavedWeights const& saved, Address stats, int lane,
                            Packed& words) const {
    softmax_grad<Product>(dp, saved.products, stats, lane);
    Products::pack(dp, words);
  }

  // From dP of a slice to P (dP - delta), with P of dV or of `saved`. From: its type.
  template <class From = Element>
  CUTE_DEVICE void softmax_grad(Slice& dp, Packed const& saved, Address stats, int lane) const {
    for_queries(stats, lane, [&](int m, int n, int i, float (&stat)[2]) {
      float const weight = element_of<From>(saved, m, n, i);
      if constexpr (Config::kMayDrop) {
        dp(i, m, n) = fmaf(fmaxf(weight, 0.0f), dp(i, m, n), -fabsf(weight) * stat[1]);
      } else {
        dp(i, m, n) = weight * (dp(i, m, n) - stat[1]);
      }
    });
  }

 private:
  // Slope of softcap logit / cap.
  CUTE_DEVICE float slope_of_softcap(float x) const {
    return score.cap > 0.0f ? 1.0f - x * x : 1.0f;
  }

  // Calls visit(m, n, i, stat) for all elements, with the statistics of their queries.
  template <class Visit>
  CUTE_DEVICE static void for_queries(Address stats, int lane, Visit&& visit) {
    CUTE_UNROLL
    for (int n = 0; n < Config::kSlice / 16; ++n) for_queries(n, stats, lane, visit);
  }
  // for_queries() for the n16-th 16 queries.
  template <class Visit>
  CUTE_DEVICE static void for_queries(int n16, Address stats, int lane, Visit&& visit) {
    stats += Address(lane % 4 * 16);
    CUTE_UNROLL
    for (int n = 2 * n16; n < 2 * n16 + 2; ++n) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        float stat[2];
        Arch::load_shared(stats + Address(n * 64 + j * 8), stat);
        CUTE_UNROLL
        for (int m = 0; m < kKeyBlocks; ++m) {
          CUTE_UNROLL
          for (int i = j; i < 4; i += 2) visit(m, n, i, stat);
        }
      }
    }
  }

  // Applies dropout to 16 queries of a slice: sets dropped weights to 0 in `words`, and sets their
  // sign bit in `saved`. One draw covers the keys of two neighbouring lanes and one of the queries
  // that they share. So each lane draws for one query, and the two lanes exchange.
  CUTE_DEVICE void drop(StepPlace const& at, int slice, int lane, int n, Packed& words,
                        SavedWeights& saved) const {
    bool const is_odd = lane / 4 % 2;
    int const query = at.first_query + slice * Config::kSlice + lane % 4 * 2 + is_odd;
    // Halves: this lane's keys for the even query, and for the odd query.
    uint32_t const selector = is_odd ? 0x3276 : 0x5410;
    PhiloxWords drawn =
        dropout.draw(at.batch, at.head, query + n * 16, at.first_key + (lane / 4 & 6));
    CUTE_UNROLL
    for (int w = 0; w < 4; ++w) {
      uint32_t const other = Arch::shuffle_xor(drawn.word[w], 4);
      drawn.word[w] = Arch::prmt(drawn.word[w], other, selector);
    }
    CUTE_UNROLL
    for (int m = 0; m < kKeyBlocks; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const keys = (kKeyBlocks == 1 ? at.first_key & 16 : m * 16) + i % 2 * 8;
        uint32_t const kept = kept_weights<Arch>(dropout, drawn, i / 2, keys);
        words[n][m][i] &= kept;
        saved.products[n][m][i] |= ~kept & 0x80008000u;
        if constexpr (std::is_same_v<SavedWeights, OfLogits>) {
          saved.logits[n][m][i] |= ~kept & 0x80008000u;
        }
      }
    }
  }

  // Sets to -inf the keys that a query does not see.
  CUTE_DEVICE void apply_mask(Slice& x, StepPlace const& at, int slice, Address queries,
                              int lane) const {
    SlicePlace const place{opaque(lane)};
    int const first_query = at.first_query + slice * Config::kSlice;
    CUTE_UNROLL
    for (int m = 0; m < kKeyBlocks; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int32_t seen_by[2];
        Arch::load_shared(queries + Address(place.key(m, 2 * half) * 8), seen_by);
        int const begin = seen_by[0] - first_query, end = seen_by[1] - first_query;
        CUTE_UNROLL
        for (int n = 0; n < kQueryColumns; ++n) {
          CUTE_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            int const query = place.query(n, i);
            x(i, m, n) = query >= begin && query < end ? x(i, m, n) : -kInf;
          }
        }
      }
    }
  }

  // The queries of a thread for one of its keys, with the interface of the general score.
  struct Logits {
    StepPlace const& at;
    SlicePlace place;
    int slice, m, half;
    CUTE_DEVICE int batch() const { return at.batch; }
    CUTE_DEVICE int head(int) const { return at.head; }
    CUTE_DEVICE int query(int i) const {
      return at.first_query + slice * Config::kSlice + place.query(i / 2, i % 2);
    }
    CUTE_DEVICE int key(int) const { return at.first_key + place.key(m, 2 * half); }
  };

  // All queries and keys of a thread, with that interface.
  struct SliceLogits {
    StepPlace const& at;
    SlicePlace place;
    int slice;
    CUTE_DEVICE int query(int i) const {
      return at.first_query + slice * Config::kSlice + place.query(i / 2, i % 2);
    }
    CUTE_DEVICE int key(int j) const { return at.first_key + place.key(j / 2, j % 2 * 2); }
  };

  // Applies a user's function, for the queries of one key at a time.
  CUTE_DEVICE void apply_mod(Slice& x, Slice& slope, StepPlace const& at, int slice,
                             int lane) const {
    static_assert(!Score::kHasSoftcap && !Score::kHasAlibi, "score_mod gets the product alone");
    static_assert(!kHasBias && !kHasMask, "a bias or mask would come before score_mod");
    CUTE_UNROLL
    for (int m = 0; m < kKeyBlocks; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        auto const of_key = [&](int i, int) -> float& { return x(2 * half + i % 2, m, i / 2); };
        auto const set_slope = [&](int i, int, float x) { slope(2 * half + i % 2, m, i / 2) = x; };
        Score::Mod::template apply<2 * kQueryColumns, 1>(
            p, of_key, score.unit_of_mod(), Logits{at, {opaque(lane)}, slice, m, half}, set_slope);
      }
    }
  }

  // Applies the terms after the softcap, except for the interval mask.
  CUTE_DEVICE void apply_terms(Slice& x, StepPlace const& at, SeqLens lens, int slice,
                               Entries const& entries, int lane) const {
    if constexpr (kHasTerm<Score, Alibi>) {
      auto const logits = [&](int i, int j) -> float& {
        return x(j % 2 * 2 + i % 2, j / 2, i / 2);
      };
      score.template add_alibi<2 * kQueryColumns, 2 * kKeyBlocks>(
          score.head(lens, at.batch, at.head), logits, SliceLogits{at, {opaque(lane)}, slice});
    }
    if constexpr (kHasBias) {
      for_all([&](int m, int n, int i) {
        x(i, m, n) = score.add_bias(x(i, m, n), element_to_float<Element>(entries.bias(m, n, i)));
      });
    }
    if constexpr (kHasMask) {
      for_all([&](int m, int n, int i) {
        x(i, m, n) = entries.mask(m, n, i) == 0 ? -kInf : x(i, m, n);
      });
    }
  }

  CUTE_DEVICE void apply_general(Slice& x, Slice& slope, StepPlace const& at, int slice,
                                 int lane) const {
    constexpr int kQueries = 2 * kQueryColumns;
    CUTE_UNROLL
    for (int m = 0; m < kKeyBlocks; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        auto const of_key = [&](int i, int) -> float& { return x(2 * half + i % 2, m, i / 2); };
        auto const set_slope = [&](int i, int, float x) { slope(2 * half + i % 2, m, i / 2) = x; };
        Logits const place{at, {opaque(lane)}, slice, m, half};
        CUTE_UNROLL
        for (int i = 0; i < kQueries; ++i) set_slope(i, 0, 1.0f);
        score.template scale<kQueries, 1>(of_key);
        score.template add_terms<kQueries, 1>(of_key, place, set_slope);
      }
    }
  }
};

}  // namespace cutlass_attn
