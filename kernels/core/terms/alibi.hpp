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

  // x(i, j) = x(i, j) * factor - slope * |distance|, in units of log2.
  //   place: where x is: batch(), head(i), query(i), key(j), lens() of the batch entry.
  template <int kRows, int kKeys, class X, class Place>
  CA_HOST_DEVICE static void add(Problem const& p, X&& x, float factor, Place const& place) {
    SeqLens const lens = place.lens();
    float const diagonal = float(int64_t(lens.k) - lens.q + p.mask.diagonal_shift);
    auto const slope_of = [&](int i) {
      return kLog2e *
             p.logits.alibi_slopes[place.batch() * p.logits.alibi_batch_stride + place.head(i)];
    };
    auto const first_of = [&](int i) { return float(place.key(0) - place.query(i)) - diagonal; };
    auto const step = [&](int j) { return float(place.key(j) - place.key(0)); };
    // Keys right of the diagonal are masked under a causal mask. For the others the distance is
    // linear in the key, which saves one of three instructions per logit.
    bool const is_causal = p.mask.causal;
    unpredicated_if(is_causal, [&] {
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const slope = slope_of(i), of_first = slope * first_of(i);
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) = fmaf(x(i, j), factor, fmaf(slope, step(j), of_first));
        }
      }
    });
    unpredicated_if(!is_causal, [&] {
      CA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const slope = slope_of(i), first = first_of(i);
        CA_UNROLL
        for (int j = 0; j < kKeys; ++j) {
          x(i, j) = fmaf(x(i, j), factor, -slope * fabsf(first + step(j)));
        }
      }
    });
  }
};

}  // namespace cutlass_attn
