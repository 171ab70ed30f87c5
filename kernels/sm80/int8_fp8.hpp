// The schedule of the mma.sync forward kernel with P V in e4m3: that of int8.hpp, from the last
// tile to the first. All of P of a tile comes first, because its sums tell whether the row max has
// to be updated before P V is added to O. With 32 rows a warp, S is computed for 32 keys at a time:
// Q is read twice, but S takes half of the registers. At d128 a tile of keys is 753 instructions
// without local memory; with S of 64 keys it was 812, with 48 bytes of local memory.
#pragma once

#include "sm80/fp8_weights.hpp"
#include "sm80/int8.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct Int8Fp8Schedule : Int8Schedule<Config, Score, Arch> {
  using Base = Int8Schedule<Config, Score, Arch>;
  using Weights = Fp8Weights<Config, Score, Arch>;
  using Base::in, Base::out, Base::kN, Base::kRows;
  using Step = typename Base::Step;
  static constexpr int kKeyBlocks = Step::kKeyBlocks;

  using Base::Base;

  CUTE_DEVICE void run() {
    int key = in.range.end - kN;
    Base::begin(key);
    for (; key >= in.range.begin; key -= kN) {
      if (Base::is_full(key)) {
        step(key, std::true_type{});
      } else {
        step(key, std::false_type{});
      }
    }
  }

  // A tile of keys. is_full: no key of it is masked.
  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Base::begin_tile(key, key - kN, key > in.range.begin);
    typename Weights::P p;
    softmax(key, is_full, p);
    float const v_scale = Base::scales(key).v;
    Base::begin_pv(key - kN);
    Weights::multiply(p, opaque(Base::v_rows()), v_scale, out.acc_o);
  }

  // From Q and K of a tile to P.
  template <class IsFull>
  CUTE_DEVICE void softmax(int key, IsFull is_full, typename Weights::P& p) {
    auto& softmax = out.softmax;
    float row_max[kRows], sums[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].max;
    softmax_weights(key, is_full, row_max, p);
    Weights::add_up(p, sums);
    bool ok = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) ok = ok && is_small(sums[i]);
    unpredicated_if(Arch::any(!ok), [&] {  // update the row max, from S recomputed
      int large = 0;  // one bit per row; without it, sums of rows take 16 bytes of local memory
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) large |= is_small(sums[i]) ? 0 : 1 << i;
      large = opaque(large);
      auto const update = [&](float const(&max)[kRows]) {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          float const to = max[i] - quantize::kFp8Log2Weight;
          softmax.rescale(as_rows(out.acc_o), {large >> i & 1, to}, i, 1.0f);
          row_max[i] = softmax.rows[i].row_max_ref();
        }
      };
      float max[kRows];
      if constexpr (kKeyBlocks == 1) {
        typename Step::S s;
        auto const units = Base::scores(key, 0, is_full, in.units(key), s);
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) max[i] = softmax.max_of_quad(as_rows(s), i, units);
        update(max);
        Weights::softmax_weights(as_rows(s), row_max, units, 0, p);
      } else {
        CUTE_UNROLL
        for (int j = 0; j < kKeyBlocks; ++j) {
          typename Step::S s;
          auto const units = Base::scores(key, j, is_full, in.units(key), s);
          CUTE_UNROLL
          for (int i = 0; i < kRows; ++i) {
            float const of_block = softmax.max_of_quad(as_rows(s), i, units);
            max[i] = j == 0 ? of_block : fmaxf(max[i], of_block);
          }
        }
        update(max);
        softmax_weights(key, is_full, row_max, p);
      }
      Weights::add_up(p, sums);
    });
    // All threads of a quad have the whole sum, and complete_sums() will add up four of them.
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      softmax.rows[i].sum = fmaf(sums[i], 0.25f, softmax.rows[i].sum);
    }
  }

  // Computes P, a key block at a time.
  template <class IsFull>
  CUTE_DEVICE void softmax_weights(int key, IsFull is_full, float const (&row_max)[kRows],
                                   typename Weights::P& p) const {
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) {
      typename Step::S s;
      // Otherwise the compiler interleaves the key blocks, and keeps S of several of them live.
      // Without masks there are enough registers for that.
      if (!is_full && j > 0) Arch::sync_warp();
      auto const units = Base::scores(key, j, is_full, in.units(key), s);
      Weights::softmax_weights(as_rows(s), row_max, units, j, p);
    }
  }

  CUTE_DEVICE static bool is_small(float sum) { return sum < quantize::kFp8Limit; }
};

}  // namespace cutlass_attn::sm80
