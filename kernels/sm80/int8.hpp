// The schedule of the mma.sync forward kernel with P V in int8.
//
// Weights are rounded relative to the largest of their row in a tile: S of the whole tile comes
// first, and all of P before P V. K and its scales, and V, have one buffer each:
//
//   cp.async   V(n) -----------------+   K(n+1) ---+
//   compute    Q K(n), softmax, P'   |   P' V(n)   |   Q K(n+1) ...
//           ^ K(n) landed              ^ V(n) landed
#pragma once

#include "sm80/quantized_weights.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct Int8Schedule {
  using Step = Products<Config, Score, Arch>;
  using Weights = QuantizedWeights<Config, Score, Arch>;
  static constexpr int kN = Config::kBlockN, kRows = Config::kRows;

  Operands<Config, Score, Arch>& in;
  Result<Config, Score, Arch>& out;

  CUTE_DEVICE Int8Schedule(Operands<Config, Score, Arch>& in, Result<Config, Score, Arch>& out)
      : in(in), out(out) {}

  CUTE_DEVICE void run() {
    in.copy.copy_k(in.range.begin, 0);
    in.write_q8();
    in.for_each_tile([&](int key, auto is_full) { step(key, is_full); });
  }

  // A tile of keys. is_full: all queries see all of it.
  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Arch::template async_copy_wait<0>();
    Arch::sync();  // K and scales full; V empty
    in.copy.copy_v(key, 0);
    typename Weights::P p;
    float factors[kRows];
    softmax(key, is_full, p, factors);
    Arch::template async_copy_wait<0>();
    Arch::sync();  // V full; K and scales empty
    in.copy.copy_k(key + kN, 0);
    Weights::multiply(p, opaque(in.v_rows), factors, out.acc_o);
  }

  // From Q and K of a tile to P.
  template <class IsFull>
  CUTE_DEVICE void softmax(int key, IsFull is_full, typename Weights::P& p,
                           float (&factors)[kRows]) {
    auto const& scales = in.shared.block.scales[0];
    auto& softmax = out.softmax;
    typename Step::S acc_s[1];
    Tensor s = as_rows(acc_s[0]);
    float row_max[kRows];
    if constexpr (Score::kIsGeneral) {
      scores(key, is_full, acc_s);
      softmax.update_max_checked(s, as_rows(out.acc_o), in.log2_scale);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].row_max_ref();
      Weights::weigh(s, softmax, row_max, ScaledUnits{in.log2_scale}, scales, is_full);
    } else {
      auto const units = scores(key, is_full, acc_s);
      bool ok = true;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].max;
      Weights::weigh(s, softmax, row_max, units, scales, is_full);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) ok = ok && softmax.is_small(i);
      unpredicated_if(Arch::any(!ok), [&] {  // the row max has to be updated: from S once more
        auto const units = scores(key, is_full, acc_s);
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          softmax.update_max_of_row(s, as_rows(out.acc_o), units, i);
          row_max[i] = softmax.rows[i].row_max_ref();
        }
        Weights::weigh(s, softmax, row_max, units, scales, is_full);
      });
    }
    Weights::round(s, softmax, scales, p, factors);
  }

  // S of a tile, with score_mod and mask; what it is in.
  template <class IsFull>
  CUTE_DEVICE auto scores(int key, IsFull is_full, typename Step::S (&acc_s)[1]) const {
    auto const q_rows = in.q_rows_of_tile();
    // opaque: with it d256 has 32 bytes of local memory fewer, and d64 without none.
    if constexpr (Config::kIsTight) {
      Step::qk_of_tile(opaque(q_rows), opaque(in.k_rows), acc_s);
    } else {
      Step::qk_of_tile(q_rows, in.k_rows, acc_s);
    }
    auto units = in.units(key);
    in.apply(as_rows(acc_s[0]), key, is_full, units);
    if constexpr (std::is_same_v<decltype(units), float>) {
      return ScaledUnits{units};
    } else {
      return units;
    }
  }
};

}  // namespace cutlass_attn::sm80
