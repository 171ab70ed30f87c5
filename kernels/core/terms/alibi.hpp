// ALiBi (arXiv 2108.12409): logit -= slope * |key - the query's key on the diagonal|.
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/opaque.hpp"
#include "core/problem.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn {

struct Alibi {
  CA_HOST_DEVICE static bool is_in(Problem const& p) { return p.logits.alibi_slopes != nullptr; }

  // Per-row state. A caller with enough registers loads it once for all key blocks.
  template <int kRows>
  struct Rows {
    float slope[kRows];       // in units of log2
    int32_t distance[kRows];  // of key 0 from the diagonal, for line()
  };
  template <int kRows, class Place>
  CA_HOST_DEVICE static Rows<kRows> rows(Problem const& p, Place const& place) {
    SeqLens const lens = place.lens();
    int64_t const any = int64_t(lens.k) - lens.q + p.mask.diagonal_shift;
    int32_t const diagonal = int32_t(any < -kMaxSeqlen  ? -kMaxSeqlen
                                     : any > kMaxSeqlen ? kMaxSeqlen
                                                        : any);
    Rows<kRows> rows;
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows.slope[i] = slope(p, place, i);
      rows.distance[i] = -place.query(i) - diagonal;
    }
    return rows;
  }

  // Per-tile state, for kernels that keep it in shared memory. Rows of one head have one slope, and
  // their distances from a key differ by constants.
  struct Tile {
    float slope;  // in units of log2
    // Keys on the diagonal of the first and of the last row. For rows of several heads they are
    // INT32_MIN and INT32_MAX, so that every key is between them.
    int32_t first_key, last_key;

    template <class Coord>
    CA_HOST_DEVICE static Tile of(Problem const& p, Coord const& tile, int rows) {
      int64_t const at = tile.seq.batch * p.logits.alibi_batch_stride + tile.head(0);
      SeqLens const lens = tile.seq.lens(p);
      int64_t const key = int64_t(tile.q_begin) + lens.k - lens.q + p.mask.diagonal_shift;
      bool const has_line = tile.heads == 1 && key >= -kMaxSeqlen && key <= kMaxSeqlen;
      return {kLog2e * p.logits.alibi_slopes[at], has_line ? int32_t(key) : INT32_MIN,
              has_line ? int32_t(key) + rows - 1 : INT32_MAX};
    }
    // Whether these keys are all on one side of the diagonal, for every row.
    CA_HOST_DEVICE bool is_on_one_side(int32_t key, int32_t keys) const {
      return key + keys - 1 <= first_key || key >= last_key;
    }
  };
  // A key block of a Tile. kIsOnOneSide: whether it is known to be on one side.
  template <bool kIsOnOneSide>
  struct KeyBlock {
    Tile const& tile;
    int32_t key, keys;
    // On one side: how the term grows with the key, and the term of a row's first key.
    CA_HOST_DEVICE float slope() const { return key > tile.first_key ? -tile.slope : tile.slope; }
    template <class Place>
    CA_HOST_DEVICE float of_row(Place const& place, int i) const {
      float const of_first = slope() * float(place.key(0) - tile.first_key - place.row(0));
      return fmaf(slope(), float(place.row(0) - place.row(i)), of_first);
    }
  };

  // Where the term is linear in the key for every row, it needs one instruction per logit: adds
  // slope * (key(j) - key(0)) to a product of row i. The rest depends on the row alone.
  template <int kRows>
  struct Line {
    float slope[kRows];  // in the units of products
    float shift[kRows];  // of logits, in units of log2
  };
  // factor: of a product in its logit, in units of log2
  template <int kRows, class Place>
  CA_HOST_DEVICE static Line<kRows> line(Rows<kRows> const& rows, float factor,
                                         Place const& place) {
    Line<kRows> line;
    float const of_product = fast_reciprocal(factor);
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      line.shift[i] = rows.slope[i] * float(place.key(0) + rows.distance[i]);
      line.slope[i] = rows.slope[i] * of_product;
    }
    return line;
  }
  template <int kRows, class Place>
  CA_HOST_DEVICE static Line<kRows> line(KeyBlock<true> const& block, float factor,
                                         Place const& place) {
    Line<kRows> line;
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      line.shift[i] = block.of_row(place, i);
      line.slope[i] = block.slope() * fast_reciprocal(factor);
    }
    return line;
  }

  // From this key on, logits of `query` and later ones grow towards smaller keys.
  CA_HOST_DEVICE static int32_t rising_from(Problem const& p, SeqLens lens, int32_t query) {
    return p.mask.causal ? INT32_MAX : query + lens.k - lens.q + p.mask.diagonal_shift;
  }

  // Per-head state, for kernels whose rows are of one head.
  struct Head {
    float slope;     // in units of log2
    float diagonal;  // the key on the diagonal of query 0
  };
  CA_HOST_DEVICE static Head head_of(Problem const& p, SeqLens lens, int batch, int head) {
    return {kLog2e * p.logits.alibi_slopes[batch * p.logits.alibi_batch_stride + head],
            float(p.mask.diagonal_shift + lens.k - lens.q)};
  }
  // add() for rows of one head. place: query(i) and key(j), which grow with i and j.
  template <int kRows, int kKeys, class X, class Place>
  CA_HOST_DEVICE static void add_of_head(Problem const& p, Head const& head, X&& x, float factor,
                                         Place const& place) {
    float const first = float(place.key(0) - place.query(0)) - head.diagonal;
    auto const step = [&](int i, int j) {
      return float(place.key(j) - place.key(0) - (place.query(i) - place.query(0)));
    };
    bool const is_left = p.mask.causal || first + step(0, kKeys - 1) <= 0.0f;
    bool const is_linear = is_left || first + step(kRows - 1, 0) >= 0.0f;
    unpredicated_if(is_linear, [&] {
      float const slope = is_left ? head.slope : -head.slope;
      float const of_first = slope * first;
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) = fmaf(x(i, j), factor, fmaf(slope, step(i, j), of_first));
        }
      }
    });
    unpredicated_if(!is_linear, [&] {
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) = fmaf(x(i, j), factor, -head.slope * fabsf(first + step(i, j)));
        }
      }
    });
  }

  // x(i, j) = x(i, j) * factor - slope * |distance|, in units of log2.
  //   place: batch(), head(i), query(i), key(j) of x, and lens() of the batch entry.
  template <int kRows, int kKeys, class X, class Place>
  CA_HOST_DEVICE static void add(Problem const& p, Rows<kRows> const& rows, X&& x, float factor,
                                 Place const& place) {
    float const diagonal = Alibi::diagonal(p, place.lens());
    auto const step = [&](int j) { return float(place.key(j) - place.key(0)); };
    // On one side of the diagonal the distance is linear in the key, which saves one of three
    // instructions per logit. Under a causal mask, keys right of the diagonal are masked.
    float first[kRows], slope[kRows];
    bool is_linear = true;
    CA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      first[i] = float(place.key(0) - place.query(i)) - diagonal;
      bool const is_left = p.mask.causal || first[i] + step(kKeys - 1) <= 0.0f;
      slope[i] = is_left ? rows.slope[i] : -rows.slope[i];
      is_linear = is_linear && (is_left || first[i] >= 0.0f);
    }
    unpredicated_if(is_linear, [&] {
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const of_first = slope[i] * first[i];
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) = fmaf(x(i, j), factor, fmaf(slope[i], step(j), of_first));
        }
      }
    });
    unpredicated_if(!is_linear, [&] {
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) = fmaf(x(i, j), factor, -rows.slope[i] * fabsf(first[i] + step(j)));
        }
      }
    });
  }

  // add() for a key block. The position of the block alone selects the branch, so that the logits
  // of a row do not depend on the other rows of its warp.
  //   place: also row(i) of the tile, and again(): an opaque copy of place, to be recomputed.
  template <int kRows, int kKeys, bool kIsOnOneSide, class X, class Place>
  CA_HOST_DEVICE static void add(Problem const& p, KeyBlock<kIsOnOneSide> const& block, X&& x,
                                 float factor, Place const& place) {
    auto const step = [&](int j) { return float(place.key(j) - place.key(0)); };
    auto const add_line = [&] {
      float const slope = block.slope();
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const of_row = block.of_row(place, i);
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) = fmaf(x(i, j), factor, of_row);
          if (j > 0) x(i, j) = fmaf(slope, step(j), x(i, j));
        }
      }
    };
    if constexpr (kIsOnOneSide) return add_line();
    bool const is_on_one_side = block.tile.is_on_one_side(block.key, block.keys);
    unpredicated_if(is_on_one_side, add_line);
    unpredicated_if(!is_on_one_side, [&] {
      float const diagonal = Alibi::diagonal(p, place.lens());
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        Place const at = place.again();
        float const slope = -Alibi::slope(p, at, i);
        float const first = float(at.key(0) - at.query(i)) - diagonal;
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) = fmaf(x(i, j), factor, slope * fabsf(first + step(j)));
        }
      }
    });
  }

 private:
  // Key on the diagonal of query 0.
  CA_HOST_DEVICE static float diagonal(Problem const& p, SeqLens lens) {
    return float(int64_t(lens.k) - lens.q + p.mask.diagonal_shift);
  }
  template <class Place>
  CA_HOST_DEVICE static float slope(Problem const& p, Place const& place, int i) {
    int64_t const at = place.batch() * p.logits.alibi_batch_stride + place.head(i);
    return kLog2e * p.logits.alibi_slopes[at];
  }
};

}  // namespace cutlass_attn
