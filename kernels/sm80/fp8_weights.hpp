// P in e4m3, and P V: core/quantize.hpp's kFp8.
//
//   P    weights in e4m3, relative to a lagging row max: kFp8Weight is the weight of a logit that
//        equals the row max. The row sum of a tile is one more product, of P and ones. While it is
//        below kFp8Limit no weight is clipped, so no row max has to be found
//   O    += (P v8) * scale of V. Sums within a tile are in fp16, sums over tiles in fp32
#pragma once

#include "sm80/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct Fp8Weights {
  using Step = Products<Config, Score, Arch>;
  using Address = typename Arch::SmemAddress;
  using Words = typename Step::Words;
  static constexpr int kRows = Config::kRows, kRowBlocks = Config::kRowBlocks;
  static constexpr int kSteps = Config::kBlockN / 32;  // k-steps of P V
  using P = Words[kSteps][kRowBlocks];

  // P of the scores of key block j.
  template <class S, class Units>
  CUTE_DEVICE static void softmax_weights(S const& s, float const (&row_max)[kRows],
                                          Units const& units, int j, P& p) {
    int const first = j * (Step::kKeyBlock / 32);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const factor = units.factor(i), offset = units.offset(i, row_max[i]);
      CUTE_UNROLL
      for (int b = 0; b < Step::kKeyBlock / 16; ++b) {
        float weights[4];
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) weights[e] = fast_exp2(fmaf(s(i, 4 * b + e), factor, offset));
        p[first + b / 2][i / 2][i % 2 + b % 2 * 2] =
            Arch::pack_e4m3(weights[0], weights[1], weights[2], weights[3]);
      }
    }
  }

  // The sums of P of a tile: all threads of a quad get the sum of their row.
  CUTE_DEVICE static void add_up(P const& p, float (&sums)[kRows]) {
    constexpr uint32_t kOnes = 0x38383838u;
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      uint32_t acc[2] = {0, 0};
      CUTE_UNROLL
      for (int n = 0; n < kSteps; ++n) Arch::mma_e4m3(acc, p[n][m], {kOnes, kOnes}, acc);
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) sums[2 * m + i] = half_to_float(uint16_t(acc[i]));
    }
  }

  // O += P V for a tile.
  CUTE_DEVICE static void multiply(P const& p, Address v_rows, float v_scale, typename Step::O& o) {
    CUTE_UNROLL
    for (int d = 0; d < Config::kHeadDimV / 16; ++d) {
      uint32_t acc[2][kRowBlocks][2] = {};  // eight columns; rows g, g + 8: a pair of columns
      CUTE_UNROLL
      for (int n = 0; n < kSteps; ++n) {
        Words words;
        Step::load_v(v_rows, n, d, words);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int m = 0; m < kRowBlocks; ++m) {
            Arch::mma_e4m3(acc[half][m], p[n][m], {words[2 * half], words[2 * half + 1]},
                           acc[half][m]);
          }
        }
      }
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) {
            float& at = o(i, m, 2 * d + half);
            at = fmaf(half_to_float(uint16_t(acc[half][m][i / 2] >> i % 2 * 16)), v_scale, at);
          }
        }
      }
    }
  }
};

}  // namespace cutlass_attn::sm80
