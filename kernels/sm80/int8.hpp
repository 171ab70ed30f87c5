// The schedule of the mma.sync forward kernel with P V in int8.
//
// Weights are rounded relative to the largest of their row in a tile: S of the whole tile comes
// first, and all of P before P V. K and its scales, and V, have two buffers each, and a tile one
// barrier:
//
//   cp.async   K, V(n+1) -----------------+   K, V(n+2) ---
//   compute    Q K(n), softmax, P' V(n)   |   Q K(n+1) ...
//           ^ K, V(n) landed                ^ K, V(n+1) landed
//
// Beyond a head_dim of 128 they have one each, and a tile two barriers:
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
  static constexpr int kKeyBlocks = Step::kKeyBlocks, kStages = Config::kStages;

  Operands<Config, Score, Arch>& in;
  Result<Config, Score, Arch>& out;

  float magic[kRows] = {};  // how many times O has kMagic in it
  int stage = 1;            // of the buffers of the tile before, and then of the tile's own

  CUTE_DEVICE Int8Schedule(Operands<Config, Score, Arch>& in, Result<Config, Score, Arch>& out)
      : in(in), out(out) {}

  CUTE_DEVICE void run() {
    int key = in.range.begin;
    begin(key);
    for (; key < in.range.end; key += kN) {
      if (is_full(key)) {
        step(key, true_type{});
      } else {
        step(key, false_type{});
      }
    }
    Weights::take_off_magic(as_rows(out.acc_o), magic);
  }

  // A tile of keys. is_full: all queries see all of it.
  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    begin_tile(key, key + kN);
    typename Weights::P p;
    float factors[kRows];
    softmax(key, is_full, p, factors);
    begin_pv(key + kN);
    Weights::multiply(p, opaque(v_rows()), factors, in.start, out.acc_o, magic);
    constexpr int kMagicKeys = Weights::kMagicTiles * kN;
    unpredicated_if((key & (kMagicKeys - 1)) == kMagicKeys - kN,
                    [&] { Weights::take_off_magic(as_rows(out.acc_o), magic); });
  }

  // Copies the first tile, and rounds Q, in whose place the second buffers are.
  CUTE_DEVICE void begin(int key) {
    in.copy.copy_k(key, 0);
    if constexpr (kStages == 2) in.copy.copy_v(key, 0);
    in.write_q8();
  }

  // K and scales of the tile full, with two buffers V, too; those of the tile before, or V, empty.
  CUTE_DEVICE void begin_tile(int key, int next) {
    stage = kStages == 2 ? stage ^ 1 : 0;
    Arch::template async_copy_wait<0>();
    Arch::sync();  // K and scales full; V, or the other buffers, empty
    if constexpr (kStages == 2) {
      in.copy.copy_k(next, stage ^ 1);
      in.copy.copy_v(next, stage ^ 1);
    } else {
      in.copy.copy_v(key, 0);
    }
  }

  // V full.
  CUTE_DEVICE void begin_pv(int next) {
    if constexpr (kStages == 1) {
      Arch::template async_copy_wait<0>();
      Arch::sync();  // V full; K and scales empty
      in.copy.copy_k(next, 0);
    }
  }

  // scores.is_full() without a branch of its own, which takes four instructions more.
  CUTE_DEVICE bool is_full(int key) const {
    TileRange const& range = in.range;
    bool const is_behind = key >= range.full_begin, is_before = key < range.full_end;
    return !Score::kIsGeneral && (is_behind & is_before);
  }

  CUTE_DEVICE auto const& scales(int key) const {
    return in.shared.block.scales[Config::place_of_scales(key)];
  }
  CUTE_DEVICE auto k_rows() const { return in.k_rows + stage * Config::kKStride; }
  CUTE_DEVICE auto v_rows() const { return in.v_rows + stage * Config::kVStride; }

  // From Q and K of a tile to P.
  template <class IsFull>
  CUTE_DEVICE void softmax(int key, IsFull is_full, typename Weights::P& p,
                           float (&factors)[kRows]) {
    auto& softmax = out.softmax;
    typename Weights::W w;
    typename Weights::Largest largest;
    float row_max[kRows];
    if constexpr (Score::kIsGeneral) {
      typename Step::S acc_s;
      Tensor s = as_rows(acc_s);
      auto const units = scores(key, 0, is_full, in.units(key), acc_s);
      Weights::take_off_magic(as_rows(out.acc_o), magic);
      softmax.update_max_checked(s, as_rows(out.acc_o), in.log2_scale);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].row_max_ref();
      uint32_t of_thread[kRows];
      Weights::weigh(s, row_max, units, scales(key), is_full, 0, w, of_thread);
      Weights::find_largest(of_thread, largest);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].max;
      weigh(key, is_full, row_max, w, largest);
      bool const ok = Weights::are_small(largest);
      unpredicated_if(Arch::any(!ok), [&] {  // the row max has to be updated: from S once more
        int large = 0;                       // a bit a row
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) large |= Weights::is_small(largest, i) ? 0 : 1 << i;
        large = opaque(large);
        float max[kRows];
        CUTE_UNROLL
        for (int j = 0; j < kKeyBlocks; ++j) {
          typename Step::S s;
          auto const units = scores(key, j, is_full, in.units(key), s);
          CUTE_UNROLL
          for (int i = 0; i < kRows; ++i) {
            float const of_block = softmax.max_of_quad(as_rows(s), i, units);
            max[i] = j == 0 ? of_block : fmaxf(max[i], of_block);
          }
        }
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          // Other rows keep what they have: what they come to must not depend on this one.
          unpredicated_if(large >> i & 1, [&] {
            Weights::take_off_magic_of_row(as_rows(out.acc_o), magic, i);
            softmax.rescale(as_rows(out.acc_o), {true, max[i]}, i, 1.0f);
          });
          row_max[i] = softmax.rows[i].row_max_ref();
        }
        Arch::sync_warp();  // quads have gone different ways
        weigh(key, is_full, row_max, w, largest);
      });
    }
    Weights::round(w, largest, softmax, scales(key), p, factors);
  }

  // w, a key block at a time.
  template <class IsFull>
  CUTE_DEVICE void weigh(int key, IsFull is_full, float const (&row_max)[kRows],
                         typename Weights::W& w, typename Weights::Largest& largest) const {
    uint32_t of_thread[kRows];
    auto const of_tile = in.units(key);
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) {
      typename Step::S s;
      // Or the compiler mixes the key blocks, and S takes the registers of all.
      if (j > 0) Arch::sync_warp();
      auto const units = scores(key, j, is_full, of_tile, s);
      Weights::weigh(as_rows(s), row_max, units, scales(key), is_full, j, w, of_thread);
    }
    Weights::find_largest(of_thread, largest);
  }

  // S of key block j, with score_mod and mask; what it is in: `units`, but for NaN.
  template <class IsFull, class Units>
  CUTE_DEVICE auto scores(int key, int j, IsFull is_full, Units units, typename Step::S& s) const {
    // opaque: without, sm89/int8_fp8 d128 128x64x4 has 24 bytes of local memory.
    Step::qk_from_shared(in.q_rows_of_tile(), opaque(k_rows()), j, in.start, s);
    in.apply(as_rows(s), key + j * Step::kKeyBlock, is_full, units);
    if constexpr (std::is_same_v<decltype(units), float>) {
      return ScaledUnits{units};
    } else {
      return units;
    }
  }
};

}  // namespace cutlass_attn::sm80
