// score_mod and mask of a key block's fragment, between Q K^T and softmax.
#pragma once

#include <type_traits>

#include "core/mask.hpp"
#include "core/opaque.hpp"
#include "core/scheduler.hpp"
#include "core/score.hpp"
#include "tile/fragment.hpp"
#include "tile/units.hpp"

namespace cutlass_attn {

// Fragments are accessed through as_rows(): (row, key), with kRows rows per thread.
//   Place:     FragmentPlace of the kernel's warps
//   kIsTight:  whether saving one register is worth a few instructions
template <class Arch, class Score, class Place, int kRows, bool kIsTight, class Coord = TileCoord>
struct FragmentScores {
  Problem const& p;
  Score const score;
  Place const place;
  // References, mostly to shared memory: main loops have no registers for copies.
  Coord const& tile;
  TileRange const& range;  // in keys
  TileMask const& interval;

  // Whether the key tile at `key` runs the code for full tiles, in which no key is masked. The
  // general score has no second code for full tiles: its code is long, and most of it would be
  // there twice.
  CUTE_DEVICE auto is_full(int key) const {
    if constexpr (Score::kIsGeneral) {
      return std::false_type{};
    } else {
      return range.is_full(key);
    }
  }

  // Whether the key block at `key` may have masked keys in some row.
  CUTE_DEVICE bool may_mask_keys(int key) const {
    bool const has_mask = Score::kIsGeneral && p.mask.elements.data;
    return has_mask || !range.is_full(key);
  }

  // Values per row that a score needs and that do not depend on the key. Empty for the general
  // score.
  using Rows = typename Score::template Rows<kRows>;
  CUTE_DEVICE Rows rows() const {
    if constexpr (std::is_same_v<Rows, NoRows>) {
      return {};
    } else {
      return score.template rows<kRows>(logits_at(0));
    }
  }

  // For kernels that let the exponential apply what it can: calls weights(units) for a full key
  // block, whose scores are then in those units (tile/units.hpp). kIsAny: no units with a limit.
  // kPowers: coefficients of a softcap's polynomial.
  template <bool kIsAny, int kPowers, class S, class Weights>
  CUTE_DEVICE void with_units(S&& s, int key, Rows const& rows, Weights&& weights) const {
    if constexpr (Score::kIsLine) {
      // kIsAny is for rescaling, which compares scores.
      if constexpr (kIsAny || Score::kKeepsMaxLogit) {
        weights(line_units(s, key, rows));
      } else {
        Alibi::Line<kRows> const line = score.template line<kRows>(rows, logits_at(key));
        weights(LineUnits<kRows, true>{score.inner, line});
      }
    } else if constexpr (Score::kIsCapped) {
      score.template make_inner_positive<kRows * columns_of<decltype(s)>>(s);
      weights(SoftcapUnits<kIsAny, kPowers>{score.template powers<kPowers>()});
    } else {
      apply(s, key, std::true_type{}, rows);
      weights(ScaledUnits{score.log2_scale()});
    }
  }

  // The units of a full key block's products if the score is a line. Adds their steps.
  template <class S, class Read>
  CUTE_DEVICE LineUnits<kRows, false> line_units(S&& s, int key, Read const& read) const {
    LineUnits<kRows, false> const units{score.inner,
                                        score.template line<kRows>(read, logits_at(key))};
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 1; j < columns_of<decltype(s)>; ++j) {
        s(i, j) = fmaf(units.line.slope[i], float(Place::step(j)), s(i, j));
      }
    }
    return units;
  }

  // Applies score_mod and mask to the key block at `key`. is_full: no key of it is masked.
  template <class S, class IsFull>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full) const {
    apply(s, key, is_full, rows());
  }
  template <class S, class IsFull, class Read>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full, Read const& rows) const {
    if constexpr (is_full && Score::kIsIdentity) return;
    // Without this, the interval ends of every row stay in registers between key blocks and spill.
    forget_memory();
    if constexpr (Score::kIsGeneral) {
      scale(s);
      apply_terms(s, key);
    } else {
      if constexpr (!Score::kIsIdentity) {
        score.template apply<kRows, columns_of<decltype(s)>>(rows, s, logits_at(key));
      }
      apply_mask(s, key, is_full);
    }
  }

  // apply() for the general score in two steps. Step one, scale(), has no branch on an option.
  template <class S>
  CUTE_DEVICE void scale(S&& s) const {
    score.template scale<kRows, columns_of<decltype(s)>>(s);
  }
  template <class S>
  CUTE_DEVICE void apply_terms(S&& s, int key) const {
    score.template add_terms<kRows, columns_of<decltype(s)>>(s, logits_at(key));
    unpredicated_if(!range.is_full(key), [&] { apply_mask(s, key, std::false_type{}); });
  }

  // Sets masked keys to -inf. No other code evaluates a row's interval.
  template <class S, class IsFull>
  CUTE_DEVICE void apply_mask(S&& s, int key, IsFull is_full) const {
    if constexpr (is_full) return;
    mask_outside(
        s, key, [&](int q) { return interval.window_lo(q); },
        [&](int q) { return interval.window_hi(q); });
    // Calls without chunks jump over this. In a tight tile, ptxas allocates fewer registers with
    // this code than without it: on sm_89 it saves 8 bytes of local memory in d128 128x64x4 and in
    // d512 with softcap, and 16 in d256 with P V in fp16. The exception is the identity with 32
    // rows per warp: the branch would make its masked tiles slower.
    constexpr bool kHelps = kIsTight && (!Score::kIsIdentity || kRows == 2);
    if constexpr (Score::kHasChunks || kHelps) {
      unpredicated_if(interval.chunk, [&] {
        mask_outside(
            s, key, [&](int q) { return interval.chunk_lo(q); },
            [&](int q) { return interval.chunk_hi(q); });
      });
    }
  }

 private:
  // Whether a bit mask masks `keys` keys of a row. It takes less than two instructions per key (R2P
  // makes predicates of seven bits); two comparisons take three. It also takes registers, so tight
  // tiles do without: sm89/int8_fp8 d128 128x64x4 with softcap would have 80 bytes of local memory.
  static constexpr bool uses_bits(int keys) { return keys >= 16 && !kIsTight; }

  // Sets keys outside [lo(q), hi(q)) to -inf. q counts from the tile's first query.
  template <class S, class Lo, class Hi>
  CUTE_DEVICE void mask_outside(S&& s, int key, Lo&& lo_of, Hi&& hi_of) const {
    Place at = place;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      // Without opaque, the indices of all rows stay in registers from one key block to the next.
      at.thread = opaque(at.thread);
      int const q = tile.query(at.row(i)) - tile.q_begin;
      int const lo = lo_of(q) - key, hi = hi_of(q) - key;
      if constexpr (uses_bits(columns_of<decltype(s)>)) {
        static_assert(columns_of<decltype(s)> <= 32);
        uint32_t const sees = place.columns_before(hi) & ~place.columns_before(lo);
        CUTE_UNROLL
        for (int j = 0; j < columns_of<decltype(s)>; ++j) s(i, j) = sees >> j & 1 ? s(i, j) : -kInf;
      } else {
        CUTE_UNROLL
        for (int j = 0; j < columns_of<decltype(s)>; ++j) {
          int const n = (kIsTight ? at : place).column(j);
          s(i, j) = n >= lo && n < hi ? s(i, j) : -kInf;
        }
      }
    }
  }

  // Positions of a thread's logits, with the interface that terms expect.
  struct Logits {
    using Machine = Arch;
    FragmentScores const& scores;
    Place place;
    int first_key;
    CUTE_DEVICE int batch() const { return scores.tile.seq.batch; }
    // As tile.query() and tile.head(), but without their branch for tiles of one head. With the
    // branch the compiler duplicates the code of all terms: 4776 instructions at d64 instead of
    // 3960.
    CUTE_DEVICE int query(int i) const {
      return scores.tile.by_heads(scores.tile.row_begin + place.row(i));
    }
    CUTE_DEVICE int head(int i) const {
      Coord const& tile = scores.tile;
      return tile.head_q + tile.row_begin + place.row(i) - query(i) * tile.heads;
    }
    CUTE_DEVICE int row(int i) const { return place.row(i); }
    CUTE_DEVICE Logits again() const { return {scores, {opaque(place.thread)}, first_key}; }
    CUTE_DEVICE int key(int j) const { return first_key + scores.place.column(j); }
    CUTE_DEVICE SeqLens lens() const { return scores.tile.seq.lens(scores.p); }
  };
  CUTE_DEVICE Logits logits_at(int key) const { return {*this, {opaque(place.thread)}, key}; }
};

}  // namespace cutlass_attn
