// Weights of a key tile before they are rounded to 8 bits, for P V in int8 and in e4m3.
//
//   w        in fp16, two keys per word, relative to a lagging row max (tile/softmax_rows.hpp):
//            2^kLog2AtMax for a logit that equals the row max
//   sums     a thread's sum of w per row, in fp16, one for each half of the words. If a sum reaches
//            kLimit, the row max is updated, which almost never happens. The row sum adds w before
//            it is rounded to 8 bits, so neither the row sum nor the row max depends on V
#pragma once

#include "quantized/queries.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn {

template <class Config, class Score, class Arch>
struct TileWeights {
  using Step = Products<Config, Score, Arch>;
  using Words = typename Step::Words;
  static constexpr int kRows = Config::kRows, kRowBlocks = Config::kRowBlocks;
  static constexpr int kPairs = Config::kBlockN / 8;   // pairs of keys per row of a thread
  static constexpr int kSteps = Config::kBlockN / 32;  // k-steps of P V
  static constexpr float kLog2AtMax = 7.0f, kUnit = 1.0f / 128.0f;  // 2^-kLog2AtMax
  static constexpr uint32_t kLimit = 0x7800;                        // 2^15 in fp16
  // Weights of a thread up to 2^kLog2Headroom times that at the row max add up to kLimit at most.
  static constexpr int kLog2Headroom = 5;
  static_assert((kPairs << (int(kLog2AtMax) + kLog2Headroom)) <= 1 << 15);
  // Keeps the factors that w is multiplied by before it is rounded finite in fp16.
  static constexpr float kMin = 0x1p-7f;
  using W = uint32_t[kRows][kPairs];
  using Sums = uint32_t[kRows];
  using P = Words[kSteps][kRowBlocks];

  // Computes w of pair n of a tile and adds it to the sums. n - first: the pair in s.
  template <class S, class Units>
  CUTE_DEVICE static uint32_t weight_pair(S const& s, int i, int n, int first, Units const& units,
                                          float offset, Sums& sums) {
    float weights[2];
    CUTE_UNROLL
    for (int e = 0; e < 2; ++e) {
      weights[e] = fast_exp2(fmaf(s(i, 2 * (n - first) + e), units.factor(i), offset));
    }
    uint32_t const pair = Arch::template pack<cutlass::half_t>(weights[0], weights[1]);
    sums[i] = n == 0 ? pair : Arch::add_halves(sums[i], pair);
    return pair;
  }

  // Whether this thread's sums of all rows are small enough to keep the row maxima. The addition
  // sets the highest bit of a half that is kLimit or more.
  CUTE_DEVICE static bool are_small(Sums const& sums) {
    uint32_t of_all = sums[0];
    CUTE_UNROLL
    for (int i = 1; i < kRows; ++i) of_all = Arch::max_halves(of_all, sums[i]);
    constexpr uint32_t kToTop = 0x8000 - kLimit;
    return ((of_all + kToTop * 0x10001u) & 0x80008000u) == 0;
  }

  // One bit per row whose quad has a sum that is not small.
  CUTE_DEVICE static int large_rows(Sums const& sums) {
    uint32_t largest[kRowBlocks];
    max_of_quad(sums, largest);
    int large = 0;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) large |= half_of(largest, i) < kLimit ? 0 : 1 << i;
    return large;
  }

 protected:
  // Largest value of each row over its quad, from the larger half of x[i]. A result word holds two
  // rows: g in the low half, g + 8 in the high half.
  CUTE_DEVICE static void max_of_quad(uint32_t const (&x)[kRows], uint32_t (&largest)[kRowBlocks]) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      uint32_t const low = Arch::prmt(x[2 * m], x[2 * m + 1], 0x5410);
      uint32_t const high = Arch::prmt(x[2 * m], x[2 * m + 1], 0x7632);
      largest[m] = Arch::max_halves(low, high);
      CUTE_UNROLL
      for (int mask = 1; mask < 4; mask *= 2) {
        largest[m] = Arch::max_halves(largest[m], Arch::shuffle_xor(largest[m], mask));
      }
    }
  }
  CUTE_DEVICE static uint16_t half_of(uint32_t const (&words)[kRowBlocks], int i) {
    return uint16_t(words[i / 2] >> i % 2 * 16);
  }

  // Sum of this thread's w of row i.
  CUTE_DEVICE static float sum_of(Sums const& sums, int i) {
    return half_to_float(uint16_t(sums[i])) + half_to_float(uint16_t(sums[i] >> 16));
  }
};

}  // namespace cutlass_attn
