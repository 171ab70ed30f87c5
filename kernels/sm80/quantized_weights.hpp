// P in 8 bits without a sign, and P V in int8: core/quantize.hpp's kInt8.
//
//   w    weights of a tile, relative to a row max that lags (tile/softmax_rows.hpp), times what
//   they
//        take over of the scales of V: those of a row that are too large show in their largest
//   P'   round(255 w / largest w of the row in the tile), the largest being a matter of a quad
//   O    += (sum of P' v8) * largest / 255 * scale of V. Sums begin with the bits of kMagic, as
//   those
//        of Q K^T do, and with 64 keys stay below 2^22
//
// The row sum is one of integers, too, by dp4a: of P' times e, over 8.
//
// A product of int8 with NaN there is none. NaN of a weight, or of what it takes over, makes the
// largest NaN, as an integer larger than any other: so is the row then.
#pragma once

#include "sm80/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct QuantizedWeights {
  using Step = Products<Config, Score, Arch>;
  using Address = typename Arch::SmemAddress;
  using Words = typename Step::Words;
  using Scales = quantize::KeyValueScales;
  static constexpr int kRows = Config::kRows, kRowBlocks = Config::kRowBlocks;
  static constexpr int kSteps = Config::kBlockN / 32;  // of P V
  using P = Words[kSteps][kRowBlocks];

  CUTE_DEVICE static int thread_in_quad() {
    return (Config::kIsTight ? opaque(Arch::thread()) : Arch::thread()) % 4;
  }

  // w of the scores of a tile; of each row the largest that this thread has, in sums. is_full: no
  // key of it is masked.
  template <class S, class Softmax, class Units, class IsFull>
  CUTE_DEVICE static void weigh(S&& s, Softmax& softmax, float const (&row_max)[kRows],
                                Units const& units, Scales const& scales, IsFull) {
    Address const folded = Arch::smem_address(scales.folded) + thread_in_quad() * 8;
    uint32_t largest[kRows] = {};
    CUTE_UNROLL
    for (int n = 0; n < Config::kBlockN / 8; ++n) {
      float of_keys[2];
      Arch::load_shared(folded + n * 32, of_keys);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const offset = units.offset(i, row_max[i]);
        CUTE_UNROLL
        for (int j = 2 * n; j < 2 * n + 2; ++j) {
          float const weight = fast_exp2(fmaf(s(i, j), units.factor(i), offset));
          // A masked value may be NaN.
          bool const is_zero = !IsFull::value && weight == 0.0f;
          s(i, j) = is_zero ? 0.0f : weight * of_keys[j % 2];
          uint32_t const bits = float_bits(s(i, j));
          largest[i] = bits > largest[i] ? bits : largest[i];
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) softmax.sums[i] = bits_float(largest[i]);
  }

  // P' of them, and their sums; factors: what the rows' sums of P' v8 are multiplied by.
  template <class S, class Softmax>
  CUTE_DEVICE static void round(S const& s, Softmax& softmax, Scales const& scales, P& p,
                                float (&factors)[kRows]) {
    uint32_t eighths[4];
    float v_scale[2];
    Arch::load_shared(Arch::smem_address(scales.eighths) + thread_in_quad() * 16, eighths);
    Arch::load_shared(Arch::smem_address(&scales.v), v_scale);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      uint32_t bits = float_bits(softmax.sums[i]);
      CUTE_UNROLL
      for (int mask = 1; mask < 4; mask *= 2) {
        uint32_t const other = Arch::shuffle_xor(bits, mask);
        bits = other > bits ? other : bits;
      }
      float const largest = bits_float(bits);
      float const inverse = 255.0f * fast_reciprocal(fmaxf(largest, quantize::kLeast));
      uint32_t sum = quantize::kMagicBits;
      CUTE_UNROLL
      for (int b = 0; b < Config::kBlockN / 16; ++b) {
        uint32_t bytes[4];
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) bytes[e] = quantize::to_int8(s(i, 4 * b + e), inverse);
        uint32_t const word = Arch::pack_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
        p[b / 2][i / 2][i % 2 + b % 2 * 2] = word;
        sum = Arch::dot_bytes(word, eighths[b], sum);
      }
      float const factor = largest * (1.0f / 255.0f);
      float& row_sum = softmax.rows[i].sum;
      row_sum = fmaf(bits_float(sum) - quantize::kMagic, factor * 0.125f, row_sum);
      factors[i] = factor * v_scale[0];
    }
  }

  // O += P V of a tile.
  CUTE_DEVICE static void multiply(P const& p, Address v_rows, float const (&factors)[kRows],
                                   typename Step::O& o) {
    CUTE_UNROLL
    for (int d = 0; d < Config::kHeadDimV / 16; ++d) {
      typename Config::template Fragment<Arch, float, 16> sums;  // (MMA, M, half), as bits
      CUTE_UNROLL
      for (int n = 0; n < kSteps; ++n) {
        Words words;
        Step::load_v(v_rows, n, d, words);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int m = 0; m < kRowBlocks; ++m) {
            Step::template multiply_int8<uint8_t>(p[n][m], words + 2 * half, n == 0,
                                                  sums(_, m, half));
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
            at = fmaf(sums(i, m, half) - quantize::kMagic, factors[2 * m + i / 2], at);
          }
        }
      }
    }
  }
};

}  // namespace cutlass_attn::sm80
