// The score with every term, each switched on at run time. For calls whose composition of terms
// (score.hpp) no kernel is compiled with.
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/opaque.hpp"
#include "core/problem.hpp"
#include "core/score.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn {

// logit = softcap(softmax_scale * s) - slope * |distance from the diagonal| (ALiBi) + bias; -inf
// where the bool mask masks the key.
struct GeneralScore {
  static constexpr bool kIsIdentity = false;
  static constexpr bool kIsGeneral = true;
  static constexpr bool kIsLinear = false;
  static constexpr bool kHasChunks = true;
  using Mod = void;
  static constexpr bool kHasMod = false, kHasModSums = false, kModSumsReadScore = false,
                        kModIsSteep = false;
  static constexpr bool kKeepsMaxLogit = false;
  // These flags select the compiled-in terms; this score has its own code for all terms.
  static constexpr bool kHasAlibi = false, kHasBias = false, kHasMask = false;
  static constexpr bool kIsLine = false, kIsCapped = false;
  template <int kRows>
  using Rows = NoRows;
  Problem const& p;
  SeqLens seqlens;
  Score<Softcap> capped;
  float unit;          // factor of every logit
  float inner, outer;  // factors before and after the softcap
  float diagonal;      // key on the diagonal of query 0

  CA_HOST_DEVICE GeneralScore(Problem const& params, SeqLens lens, float factor = 1.0f,
                              float unit = 1.0f)
      : p(params),
        seqlens(lens),
        capped(params, lens, factor),
        unit(unit),
        inner(capped.cap > 0.0f ? capped.inner : capped.inner * unit),
        outer(capped.cap * unit),
        diagonal(float(int64_t(lens.k) - lens.q + p.mask.diagonal_shift)),
        terms(terms_of(params, lens)) {}

  CA_HOST_DEVICE static bool can_run(Problem const&) { return true; }
  CA_HOST_DEVICE float log2_scale() const { return kLog2e / unit; }
  CA_HOST_DEVICE float operator()(float s, int b, int h, int q, int k) const {
    One const one{s, b, h, q, k};
    scale<1, 1>(one);
    add_terms<1, 1>(one, one);
    return s;
  }
  CA_HOST_DEVICE float grad(float s, int b, int h, int q, int k) const {
    return capped.grad(s, b, h, q, k);
  }

  // The score in two steps, for the products x(i, j) of kRows rows with kKeys keys. Step one has no
  // branch: every call has a scale.
  template <int kRows, int kKeys, class X>
  CA_HOST_DEVICE void scale(X&& x) const {
    for_all<kRows, kKeys>([&](int i, int j) { x(i, j) *= inner; });
  }

  // Step two: one term after the other, each for all products. So a call jumps over its absent
  // terms, and loads do not wait for each other. Products beyond the sequences get the terms of an
  // arbitrary query and key; nothing reads them.
  //   place: batch(), head(i), query(i), key(j) of the products. Keys come in pairs: key(0) is
  //          even, key(1) = key(0) + 1.
  template <int kRows, int kKeys, class X, class Place>
  CA_HOST_DEVICE void add_terms(X&& x, Place const& place) const {
    add_terms<kRows, kKeys>(x, place, [](int, int, float) {});
  }
  // As above, and calls set_slope(i, j, .) with d logit / d(scale s) where that is not 1.
  template <int kRows, int kKeys, class X, class Place, class SetSlope>
  CA_HOST_DEVICE void add_terms(X&& x, Place const& place, SetSlope&& set_slope) const {
    unpredicated_if(terms & kSoftcap, [&] {
      for_all<kRows, kKeys>([&](int i, int j) {
        float const t = fast_tanh(x(i, j));
        set_slope(i, j, 1.0f - t * t);
        x(i, j) = outer * t;
      });
    });
    unpredicated_if(terms & kAlibi, [&] {
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        Logits const& logits = p.logits;
        float const slope =
            logits.alibi_slopes[place.batch() * logits.alibi_batch_stride + place.head(i)] * unit;
        float const first = float(place.key(0) - place.query(i)) - diagonal;
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) -= slope * fabsf(first + float(place.key(j) - place.key(0)));
        }
      }
    });
    unpredicated_if(terms & kBias32, [&] {
      for_entries<kRows, kKeys, float>(
          p.logits.bias, terms & kBiasPairs, place,
          [&](int i, int j, float entry) { x(i, j) = fmaf(entry, unit, x(i, j)); });
    });
    unpredicated_if(terms & kBias16, [&] {
      bool const is_half = p.logits.bias_dtype == DType::kFloat16;
      for_entries<kRows, kKeys, uint16_t>(
          p.logits.bias, terms & kBiasPairs, place, [&](int i, int j, uint16_t entry) {
            float const value = is_half ? half_to_float(entry) : bfloat16_to_float(entry);
            x(i, j) = fmaf(value, unit, x(i, j));
          });
    });
    unpredicated_if(terms & kMask, [&] {
      for_entries<kRows, kKeys, uint8_t>(
          p.mask.elements, terms & kMaskPairs, place,
          [&](int i, int j, uint8_t entry) { x(i, j) = entry == 0 ? -kInf : x(i, j); });
    });
  }

 private:
  // Terms of a call. Pairs: one load reads the entries of two neighbouring keys.
  enum Term {
    kSoftcap = 1,
    kAlibi = 2,
    kBias32 = 4,
    kBias16 = 8,
    kBiasPairs = 16,
    kMask = 32,
    kMaskPairs = 64
  };
  int terms;

  CA_HOST_DEVICE static int terms_of(Problem const& p, SeqLens lens) {
    bool const is_bias32 = p.logits.bias_dtype == DType::kFloat32;
    int const bias = (is_bias32 ? kBias32 : kBias16) |
                     (has_pairs(lens, p.logits.bias, is_bias32 ? 4 : 2) ? kBiasPairs : 0);
    int const mask = kMask | (has_pairs(lens, p.mask.elements, 1) ? kMaskPairs : 0);
    return (p.logits.softcap > 0.0f ? kSoftcap : 0) | (p.logits.alibi_slopes ? kAlibi : 0) |
           (p.logits.bias.data ? bias : 0) | (p.mask.elements.data ? mask : 0);
  }

  // Whether the entries of an even key and the next key are aligned to the size of both.
  CA_HOST_DEVICE static bool has_pairs(SeqLens lens, PerLogit const& t, int entry_bytes) {
    uint64_t const bits =
        reinterpret_cast<uint64_t>(t.data) |
        uint64_t(t.batch_stride | t.head_stride | t.row_stride) * uint64_t(entry_bytes);
    return t.key_stride == 1 && lens.k % 2 == 0 && bits % (2 * uint64_t(entry_bytes)) == 0;
  }

  // A single product and its position.
  struct One {
    float& x;
    int b, h, q, k;
    CA_HOST_DEVICE float& operator()(int, int) const { return x; }
    CA_HOST_DEVICE int batch() const { return b; }
    CA_HOST_DEVICE int head(int) const { return h; }
    CA_HOST_DEVICE int query(int) const { return q; }
    CA_HOST_DEVICE int key(int) const { return k; }
  };

  template <int kRows, int kKeys, class Visit>
  CA_HOST_DEVICE static void for_all(Visit&& visit) {
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CA_UNROLL
      for (int j = 0; j < kKeys; ++j) visit(i, j);
    }
  }

  // Calls visit(i, j, entry) for the entry of every row and key.
  template <int kRows, int kKeys, class Entry, class Place, class Visit>
  CA_HOST_DEVICE void for_entries(PerLogit const& t, int has_pairs, Place const& place,
                                  Visit&& visit) const {
    struct alignas(2 * sizeof(Entry)) Pair {
      Entry entry[2];
    };
    auto const row = [&](int i) {
      return static_cast<Entry const*>(t.data) + place.batch() * t.batch_stride +
             place.head(i) * t.head_stride + clamped(place.query(i), seqlens.q) * t.row_stride;
    };
    if (kKeys == 1) has_pairs = 0;
    unpredicated_if(has_pairs, [&] {
      Pair pairs[kRows][(kKeys + 1) / 2];
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        Entry const* const entries = row(i);
        CA_UNROLL
        for (int j = 0; j < kKeys; j += 2) {
          int const at = place.key(j) < seqlens.k ? place.key(j) : 0;
          pairs[i][j / 2] = *reinterpret_cast<Pair const*>(entries + at);
        }
      }
      for_all<kRows, kKeys>([&](int i, int j) { visit(i, j, pairs[i][j / 2].entry[j % 2]); });
    });
    unpredicated_if(!has_pairs, [&] {
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        Entry const* const entries = row(i);
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          visit(i, j, entries[clamped(place.key(j), seqlens.k) * t.key_stride]);
        }
      }
    });
  }
  CA_HOST_DEVICE static int clamped(int i, int end) { return i < end ? i : end - 1; }
};

}  // namespace cutlass_attn
