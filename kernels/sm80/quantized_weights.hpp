// P in uint8, and P V in int8: core/quantize.hpp's kInt8.
//
//   w    weights of a tile, in fp16, two keys a word, relative to a lagging row max
//        (tile/softmax_rows.hpp): 2^kLog2AtMax for a logit that equals the row max. They are
//        multiplied by V's folded scales. A weight of kLimit or more updates the row max, which
//        almost never happens
//   P'   round(255 w / largest w of the row in the tile). A quad shares the largest. Added to 1024,
//        an 8-bit integer is the low byte of an fp16
//   O    += (sum of P' v8) * largest / 255 * scale of V. Like those of Q K^T, sums begin with
//        the bits of kMagic, and with 64 keys they stay below 2^22. kMagic is added to O as well,
//        so that a sum takes one multiply-add instead of two. `magic` counts how often, and
//        subtract_magic() subtracts it every kMagicTiles tiles. Until then the error of O is less
//        than a hundredth of that of rounding P
//
// The row sum is a sum of integers, too, by dp4a: of P' times e, divided by 8.
//
// int8 cannot hold NaN. If a weight or a folded scale is NaN, the largest of the row becomes NaN,
// and so does the row.
#pragma once

#include "sm80/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct QuantizedWeights {
  using Step = Products<Config, Score, Arch>;
  using Address = typename Arch::SmemAddress;
  using Words = typename Step::Words;
  using OfLane = quantize::KeyValueScales::OfLane;
  static constexpr int kRows = Config::kRows, kRowBlocks = Config::kRowBlocks;
  static constexpr int kPairs = Config::kBlockN / 8;   // pairs of keys, in a row of a thread
  static constexpr int kSteps = Config::kBlockN / 32;  // k-steps of P V
  static constexpr int kMagicTiles = 16;
  static constexpr float kLog2AtMax = 7.0f;
  static constexpr uint32_t kLimit = 0x7800;         // 2^15 in fp16
  static constexpr uint32_t kInteger = 0x64006400u;  // 1024, twice
  // Keeps 255 / largest finite in fp16.
  static constexpr float kLeastLargest = 0x1p-7f;
  using W = uint32_t[kRows][kPairs];
  using Largest = uint32_t[kRowBlocks];  // of two rows: g in the low half, g + 8 in the high half
  using P = Words[kSteps][kRowBlocks];

  CUTE_DEVICE static int thread_in_quad() {
    return (Config::kIsTight ? opaque(Arch::thread()) : Arch::thread()) % 4;
  }

  // Computes w of the scores of key block j, and the largest w of each row in this thread. is_full:
  // no key is masked.
  template <class S, class Units, class IsFull>
  CUTE_DEVICE static void softmax_weights(S const& s, float const (&row_max)[kRows],
                                          Units const& units, OfLane const& scales, IsFull, int j,
                                          W& w, uint32_t (&of_thread)[kRows]) {
    int const first = j * (Step::kKeyBlock / 8);
    static_assert(Step::kKeyBlock % 32 == 0);
    uint32_t of_keys[4];  // for 32 keys
    CUTE_UNROLL
    for (int n = first; n < first + Step::kKeyBlock / 8; ++n) {
      if (n % 4 == 0) Arch::load_shared(Arch::smem_address(scales.folded) + n * 4, of_keys);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const offset = units.offset(i, row_max[i] - kLog2AtMax);
        float weights[2];
        CUTE_UNROLL
        for (int e = 0; e < 2; ++e) {
          weights[e] = fast_exp2(fmaf(s(i, 2 * (n - first) + e), units.factor(i), offset));
        }
        uint32_t const pair = Arch::template pack<cutlass::half_t>(weights[0], weights[1]);
        uint32_t of_pair = of_keys[n % 4];
        // The scale of a masked key may be NaN.
        if constexpr (!IsFull::value) of_pair &= nonzero_halves(pair);
        w[i][n] = Arch::multiply_halves(pair, of_pair);
        of_thread[i] = n == 0 ? w[i][n] : Arch::max_halves(of_thread[i], w[i][n]);
      }
    }
  }

  // The largest of each row, over its quad.
  CUTE_DEVICE static void find_largest(uint32_t const (&of_thread)[kRows], Largest& largest) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      uint32_t const low = Arch::prmt(of_thread[2 * m], of_thread[2 * m + 1], 0x5410);
      uint32_t const high = Arch::prmt(of_thread[2 * m], of_thread[2 * m + 1], 0x7632);
      largest[m] = Arch::max_halves(low, high);
      CUTE_UNROLL
      for (int mask = 1; mask < 4; mask *= 2) {
        largest[m] = Arch::max_halves(largest[m], Arch::shuffle_xor(largest[m], mask));
      }
    }
  }

  // Whether the weights of row i are small enough for its row max to stay.
  CUTE_DEVICE static bool is_small(Largest const& largest, int i) {
    return (largest[i / 2] >> i % 2 * 16 & 0xffffu) < kLimit;
  }
  // Whether this thread's weights of all rows are small enough. The addition sets the highest bit
  // of a half that is kLimit or more.
  CUTE_DEVICE static bool are_small(uint32_t const (&of_thread)[kRows]) {
    uint32_t of_all = of_thread[0];
    CUTE_UNROLL
    for (int i = 1; i < kRows; ++i) of_all = Arch::max_halves(of_all, of_thread[i]);
    constexpr uint32_t kToTop = 0x8000 - kLimit;
    return ((of_all + kToTop * 0x10001u) & 0x80008000u) == 0;
  }

  // Computes P' and the row sums. factors: factors of the rows' sums of P' v8.
  template <class Softmax>
  CUTE_DEVICE static void round(W const& w, Largest const& largest, Softmax& softmax,
                                OfLane const& scales, P& p, float (&factors)[kRows]) {
    uint32_t eighths[4];
    Arch::load_shared(Arch::smem_address(scales.eighths), eighths);
    float const v_scale = scales.v;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float const of_row = half_to_float(uint16_t(largest[i / 2] >> i % 2 * 16));
      float const divisor = of_row < kLeastLargest ? kLeastLargest : of_row;
      float const inverse = 255.0f * fast_reciprocal(divisor);
      uint32_t const inverses = Arch::template pack<cutlass::half_t>(inverse, inverse);
      uint32_t sum = quantize::kMagicBits;
      CUTE_UNROLL
      for (int b = 0; b < Config::kBlockN / 16; ++b) {
        uint32_t const first = Arch::multiply_add_halves(w[i][2 * b], inverses, kInteger);
        uint32_t const second = Arch::multiply_add_halves(w[i][2 * b + 1], inverses, kInteger);
        uint32_t const word = Arch::prmt(first, second, 0x6420);
        p[b / 2][i / 2][i % 2 + b % 2 * 2] = word;
        sum = Arch::dp4a(word, eighths[b], sum);
      }
      constexpr float kFactor = 1.0f / 128.0f / 255.0f;
      float& row_sum = softmax.rows[i].sum;
      row_sum = fmaf(bits_float(sum) - quantize::kMagic, divisor * (kFactor / 8), row_sum);
      factors[i] = divisor * (kFactor * v_scale);
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
  // 0xffff for each half that is not 0.
  CUTE_DEVICE static uint32_t nonzero_halves(uint32_t x) {
    return (x & 0xffffu ? 0xffffu : 0u) | (x >> 16 ? 0xffff0000u : 0u);
  }
};

}  // namespace cutlass_attn::sm80
