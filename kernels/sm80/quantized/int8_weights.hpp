// P in uint8, and P V in int8: core/quantize.hpp's kInt8.
//
//   w    of quantized/tile_weights.hpp, multiplied by the folded scales of V
//   P'   round(255 w / largest w of the row in the tile). The largest w is shared by a quad. Added
//        to 1024, an 8-bit integer is the low byte of an fp16
//   O    += (sum of P' v8) * largest / 255 * scale of V. As in Q K^T, sums begin with the bits of
//        kMagic; with 64 keys they stay below 2^22. kMagic is added to O as well, so that a sum
//        takes one multiply-add instead of two. `magic` counts how often, and subtract_magic()
//        subtracts it every kMagicTiles tiles. Until then it adds less than a hundredth of the
//        error of rounding P to the error of O
//
// int8 cannot hold NaN. If a weight or a folded scale is NaN, the largest w of the row becomes NaN,
// and so does the row of O.
#pragma once

#include "quantized/tile_weights.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct QuantizedWeights : TileWeights<Config, Score, Arch> {
  using Base = TileWeights<Config, Score, Arch>;
  using Step = Products<Config, Score, Arch>;
  using Address = typename Arch::SmemAddress;
  using Words = typename Step::Words;
  using OfLane = quantize::KeyValueScales::OfLane;
  using Base::kRows, Base::kRowBlocks, Base::kSteps;
  using typename Base::P, typename Base::Sums, typename Base::W;
  static constexpr int kMagicTiles = 16;
  static constexpr uint32_t kInteger = 0x64006400u;  // 1024, twice
  // A thread's state of the rows of a tile.
  struct OfThread {
    Sums sums;                // of weights
    uint32_t largest[kRows];  // w, in one half or the other
  };

  // Scales that this thread multiplies by.
  CUTE_DEVICE static OfLane const& own(quantize::KeyValueScales const& scales) {
    return scales.lanes[(Config::kIsTight ? opaque(Arch::thread()) : Arch::thread()) % 4];
  }

  // From scores of key block j to w, and to the state of each row in this thread. is_full: no key
  // is masked.
  template <class S, class Units, class IsFull>
  CUTE_DEVICE static void softmax_weights(S const& s, float const (&row_max)[kRows],
                                          Units const& units, OfLane const& scales, IsFull, int j,
                                          W& w, OfThread& of_thread) {
    int const first = j * (Step::kKeyBlock / 8);
    static_assert(Step::kKeyBlock % 32 == 0);
    uint32_t of_keys[4];  // for 32 keys
    CUTE_UNROLL
    for (int n = first; n < first + Step::kKeyBlock / 8; ++n) {
      if (n % 4 == 0) Arch::load_shared(Arch::smem_address(scales.folded) + n * 4, of_keys);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const offset = units.offset(i, row_max[i] - Base::kLog2AtMax);
        uint32_t const pair = Base::weight_pair(s, i, n, first, units, offset, of_thread.sums);
        uint32_t of_pair = of_keys[n % 4];
        // The scale of a masked key may be NaN.
        if constexpr (!IsFull::value) of_pair &= nonzero_halves(pair);
        w[i][n] = Arch::multiply_halves(pair, of_pair);
        uint32_t& largest = of_thread.largest[i];
        largest = n == 0 ? w[i][n] : Arch::max_halves(largest, w[i][n]);
      }
    }
  }

  // Computes P' and the row sums. factors: factor of each row's sum of P' v8.
  template <class Softmax>
  CUTE_DEVICE static void round(W const& w, OfThread const& of_thread, Softmax& softmax,
                                OfLane const& scales, P& p, float (&factors)[kRows]) {
    uint32_t largest[kRowBlocks];
    Base::max_of_quad(of_thread.largest, largest);
    float const v_scale = scales.v;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const of_row = half_to_float(Base::half_of(largest, i));
      float const divisor = of_row < Base::kMin ? Base::kMin : of_row;
      float const inverse = 255.0f * fast_reciprocal(divisor);
      uint32_t const inverses = Arch::template pack<cutlass::half_t>(inverse, inverse);
      CUTE_UNROLL
      for (int b = 0; b < Config::kBlockN / 16; ++b) {
        uint32_t const first = Arch::multiply_add_halves(w[i][2 * b], inverses, kInteger);
        uint32_t const second = Arch::multiply_add_halves(w[i][2 * b + 1], inverses, kInteger);
        p[b / 2][i / 2][i % 2 + b % 2 * 2] = Arch::prmt(first, second, 0x6420);
      }
      float& row_sum = softmax.rows[i].sum;
      row_sum = fmaf(Base::sum_of(of_thread.sums, i), Base::kUnit, row_sum);
      factors[i] = divisor * (Base::kUnit / 255.0f * v_scale);
    }
  }

  // O += P V for a tile, plus kMagic.
  CUTE_DEVICE static void multiply(P const& p, Address v_rows, float const (&factors)[kRows],
                                   typename Step::Start const& start, typename Step::O& o,
                                   float (&magic)[kRows]) {
    CUTE_UNROLL
    for (int d = 0; d < Config::kHeadDimV / 16; ++d) {
      typename Config::template Fragment<float, 16> sums;  // (MMA, M, half), as bits
      CUTE_UNROLL
      for (int n = 0; n < kSteps; ++n) {
        Words words;
        Step::load_v(v_rows, n, d, words);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int m = 0; m < kRowBlocks; ++m) {
            Step::template multiply_int8<uint8_t>(p[n][m], words + 2 * half, n == 0, start,
                                                  sums.block(m, half));
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
            at = fmaf(sums(i, m, half), factors[2 * m + i / 2], at);
          }
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) magic[i] += factors[i];
  }

  template <class O>
  CUTE_DEVICE static void subtract_magic(O&& o, float (&magic)[kRows]) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) subtract_magic_of_row(o, magic, i);
  }
  template <class O>
  CUTE_DEVICE static void subtract_magic_of_row(O&& o, float (&magic)[kRows], int i) {
    CUTE_UNROLL
    for (int j = 0; j < columns_of<decltype(o)>; ++j)
      o(i, j) = fmaf(magic[i], -quantize::kMagic, o(i, j));
    magic[i] = 0.0f;
  }

 private:
  // 0xffff for each nonzero half.
  CUTE_DEVICE static uint32_t nonzero_halves(uint32_t x) {
    return (x & 0xffffu ? 0xffffu : 0u) | (x >> 16 ? 0xffff0000u : 0u);
  }
};

}  // namespace cutlass_attn::sm80
