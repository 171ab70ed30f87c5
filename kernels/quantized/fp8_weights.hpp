// P in e4m3, and P V: core/quantize.hpp's kFp8.
//
//   P'   kFp8Sum w / (sum of w of the row in the tile), in e4m3. No weight is clipped. Sums of
//        P' v8 over 64 keys are at most 1.07 * 448 * 128, which fp16 can hold
//   O    += (sum of P' v8) * sum / kFp8Sum * scale of V. Sums within a tile are in fp16, sums over
//        tiles in fp32
#pragma once

#include "quantized/tile_weights.hpp"

namespace cutlass_attn {

template <class Config, class Score, class Arch>
struct Fp8Weights : TileWeights<Config, Score, Arch> {
  using Base = TileWeights<Config, Score, Arch>;
  using Step = Products<Config, Score, Arch>;
  using Address = typename Arch::SmemAddress;
  using Words = typename Step::Words;
  using Scales = quantize::KeyFp8Scales;
  using Base::kRows, Base::kRowBlocks, Base::kSteps;
  using typename Base::P, typename Base::Sums, typename Base::W;
  static constexpr int kMagicTiles = 0;  // O contains no kMagic
  // A thread's state of the rows of a tile.
  struct OfThread {
    Sums sums;  // of weights
  };

  CUTE_DEVICE static Scales const& own(Scales const& scales) { return scales; }

  // From scores of key block j to w, and to the sums of each row in this thread.
  template <class S, class Units, class IsFull>
  CUTE_DEVICE static void softmax_weights(S const& s, float const (&row_max)[kRows],
                                          Units const& units, Scales const&, IsFull, int j, W& w,
                                          OfThread& of_thread) {
    int const first = j * (Step::kKeyBlock / 8);
    CUTE_UNROLL
    for (int n = first; n < first + Step::kKeyBlock / 8; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const offset = units.offset(i, row_max[i] - Base::kLog2AtMax);
        w[i][n] = Base::weight_pair(s, i, n, first, units, offset, of_thread.sums);
      }
    }
  }

  // Computes P' and the row sums. factors: factor of each row's sum of P' v8.
  template <class Softmax>
  CUTE_DEVICE static void round(W const& w, OfThread const& of_thread, Softmax& softmax,
                                Scales const& scales, P& p, float (&factors)[kRows]) {
    float const v_scale = scales.v;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float sum = Base::sum_of(of_thread.sums, i);
      float& row_sum = softmax.rows[i].sum;
      row_sum = fmaf(sum, Base::kUnit, row_sum);
      sum += Arch::shuffle_xor(sum, 1);
      sum += Arch::shuffle_xor(sum, 2);
      float const divisor = sum < Base::kMin ? Base::kMin : sum;
      float const inverse = quantize::kFp8Sum * fast_reciprocal(divisor);
      uint32_t const inverses = Arch::template pack<cutlass::half_t>(inverse, inverse);
      CUTE_UNROLL
      for (int b = 0; b < Config::kBlockN / 16; ++b) {
        p[b / 2][i / 2][i % 2 + b % 2 * 2] =
            Arch::pack_halves_e4m3(Arch::multiply_halves(w[i][2 * b], inverses),
                                   Arch::multiply_halves(w[i][2 * b + 1], inverses));
      }
      factors[i] = divisor * (Base::kUnit / quantize::kFp8Sum * v_scale);
    }
  }

  template <class O>
  CUTE_DEVICE static void subtract_magic(O&&, float (&)[kRows]) {}
  template <class O>
  CUTE_DEVICE static void subtract_magic_of_row(O&&, float (&)[kRows], int) {}

  // O += P V for a tile.
  CUTE_DEVICE static void multiply(P const& p, Address v_rows, float const (&factors)[kRows],
                                   typename Step::Start const&, typename Step::O& o,
                                   float (&)[kRows]) {
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
            float const sum = half_to_float(uint16_t(acc[half][m][i / 2] >> i % 2 * 16));
            at = fmaf(sum, factors[2 * m + i / 2], at);
          }
        }
      }
    }
  }
};

}  // namespace cutlass_attn
