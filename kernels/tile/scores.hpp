// What happens to the fragment of a key block between Q K^T and softmax: score_mod and mask.
#pragma once

#include <type_traits>

#include "core/mask.hpp"
#include "core/opaque.hpp"
#include "core/scheduler.hpp"
#include "core/score.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn {

// Fragments are seen through as_rows(): (row, key), of kRows rows of a thread.
//   Place:     FragmentPlace of the kernel's warps
//   kIsTight:  whether registers are so short that one is worth a few instructions
template <class Arch, class Score, class Place, int kRows, bool kIsTight, class Coord = TileCoord>
struct FragmentScores {
  Problem const& p;
  Score const score;
  Place const place;
  // In shared memory, most of them: registers are what main loops are short of.
  Coord const& tile;
  TileRange const& range;  // in keys
  NearMask const& interval;

  // Whether code of its own is for the tile of keys that begins at `key`, because every query sees
  // all of it. The general score has none: most of its code is the same for all tiles, and long.
  CUTE_DEVICE auto is_full(int key) const {
    if constexpr (Score::kIsGeneral) {
      return std::false_type{};
    } else {
      return range.is_full(key);
    }
  }

  // What the score needs of the thread's rows: of no key. The general score has nothing of it.
  using Rows = typename Score::template Rows<kRows>;
  CUTE_DEVICE Rows rows() const {
    if constexpr (std::is_same_v<Rows, NoRows>) {
      return {};
    } else {
      return score.template rows<kRows>(logits_at(0));
    }
  }

  // Score_mod and mask of the key block that begins at `key`. is_full: no key of it is masked.
  template <class S, class IsFull>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full) const {
    apply(s, key, is_full, rows());
  }
  template <class S, class IsFull, class Read>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full, Read const& rows) const {
    if constexpr (is_full && Score::kIsIdentity) return;
    // Without, the ends of every row's interval stay in registers between key blocks, and spill.
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

  // The same for the general score in two steps, of which the first has no branch on an option.
  template <class S>
  CUTE_DEVICE void scale(S&& s) const {
    score.template scale<kRows, columns_of<decltype(s)>>(s);
  }
  template <class S>
  CUTE_DEVICE void apply_terms(S&& s, int key) const {
    score.template add_terms<kRows, columns_of<decltype(s)>>(s, logits_at(key));
    unpredicated_if(!range.is_full(key), [&] { apply_mask(s, key, std::false_type{}); });
  }

  // -inf for the keys that are masked: the one place that evaluates a row's interval.
  template <class S, class IsFull>
  CUTE_DEVICE void apply_mask(S&& s, int key, IsFull is_full) const {
    if constexpr (is_full) return;
    mask_outside(
        s, key, [&](int q) { return interval.window_lo(q); },
        [&](int q) { return interval.window_hi(q); });
    // Calls without chunks jump over this. But with it ptxas finds registers in a tight tile that
    // it does not find without: on sm_89, 8 bytes of local memory for d128 128x64x4 and d512 with
    // softcap, 16 for d256 with P V in fp16. Not so for the identity and 32 rows a warp, whose
    // masked tiles would be slower for the branch.
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
  // Whether so many keys of a row are masked by bits: less than two instructions a key (R2P makes
  // predicates of seven bits), where two comparisons are three. In tight tiles that takes
  // registers: sm89/int8_fp8 d128 128x64x4 with softcap has 80 bytes of local memory for it.
  static constexpr bool uses_bits(int keys) { return keys >= 16 && !kIsTight; }

  // -inf for keys outside [lo(q), hi(q)), q counted from the tile's first query.
  template <class S, class Lo, class Hi>
  CUTE_DEVICE void mask_outside(S&& s, int key, Lo&& lo_of, Hi&& hi_of) const {
    Place at = place;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      // Without, the numbers of all rows stay in registers from one key block to the next.
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

  // Where the logits of a thread are, as terms ask for it.
  struct Logits {
    FragmentScores const& scores;
    Place place;
    int first_key;
    CUTE_DEVICE int batch() const { return scores.tile.seq.batch; }
    // As tile.query() and tile.head(), without a branch for tiles of one head: with it the compiler
    // has the code of all terms twice, 4776 instructions at d64 instead of 3960.
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
