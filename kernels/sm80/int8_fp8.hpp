// The schedule of the mma.sync forward kernel with P V in e4m3: that of int8.hpp from the last tile
// to the first. Of a tile all of P comes first, so that its sums tell whether the row max has to be
// updated before anything joins O.
#pragma once

#include "sm80/fp8_weights.hpp"
#include "sm80/int8.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct Int8Fp8Schedule : Int8Schedule<Config, Score, Arch> {
  using Base = Int8Schedule<Config, Score, Arch>;
  using Weights = Fp8Weights<Config, Score, Arch>;
  using Base::in, Base::out, Base::kN, Base::kRows, Base::scores;

  using Base::Base;

  CUTE_DEVICE void run() {
    int key = in.range.end - kN;
    in.copy.copy_k(key, 0);
    in.write_q8();
    for (; key >= in.range.begin; key -= kN) {
      if (in.scores.is_full(key)) {
        step(key, true_type{});
      } else {
        step(key, false_type{});
      }
    }
  }

  // A tile of keys. is_full: all queries see all of it.
  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Arch::template async_copy_wait<0>();
    Arch::sync();  // K and scales full; V empty
    in.copy.copy_v(key, 0);
    typename Weights::P p;
    softmax(key, is_full, p);
    float const v_scale = in.shared.block.scales[0].v;
    Arch::template async_copy_wait<0>();
    Arch::sync();  // V full; K and scales empty
    in.copy.copy_k(key - kN, 0);
    Weights::multiply(p, opaque(in.v_rows), v_scale, out.acc_o);
  }

  // From Q and K of a tile to P.
  template <class IsFull>
  CUTE_DEVICE void softmax(int key, IsFull is_full, typename Weights::P& p) {
    auto& softmax = out.softmax;
    typename Base::Step::S acc_s[1];
    float row_max[kRows], sums[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].max;
    auto const units = scores(key, is_full, acc_s);
    Weights::weigh(as_rows(acc_s[0]), row_max, units, p, sums);
    bool ok = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) ok = ok && is_small(sums[i]);
    unpredicated_if(Arch::any(!ok), [&] {  // the row max has to be updated: from S once more
      auto const units = scores(key, is_full, acc_s);
      Tensor s = as_rows(acc_s[0]);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const max = softmax.max_of_quad(s, i, units) - quantize::kFp8Log2Weight;
        softmax.rescale(as_rows(out.acc_o), {!is_small(sums[i]), max}, i, 1.0f);
        row_max[i] = softmax.rows[i].row_max_ref();
      }
      Weights::weigh(s, row_max, units, p, sums);
    });
    // All threads of a quad have the sum, which complete_sums() adds up.
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      softmax.rows[i].sum = fmaf(sums[i], 0.25f, softmax.rows[i].sum);
    }
  }

  CUTE_DEVICE static bool is_small(float sum) { return sum < quantize::kFp8Limit; }
};

}  // namespace cutlass_attn::sm80
