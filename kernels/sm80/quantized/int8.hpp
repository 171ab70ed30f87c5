// The schedule of the mma.sync forward kernel with P V in int8 or e4m3.
//
// Weights are rounded relative to the largest weight of their row in a tile, or to their sum. So S
// of the whole tile comes first, and all of P before P V. K with its scales, and V, have two stages
// each, and a tile has one barrier:
//
//   cp.async   K, V(n+1) -----------------+   K, V(n+2) ---
//   compute    Q K(n), softmax, P' V(n)   |   Q K(n+1) ...
//           ^ K, V(n) landed                ^ K, V(n+1) landed
//
// Beyond a head_dim of 128 they have one stage each, and a tile has two barriers:
//
//   cp.async   V(n) -----------------+   K(n+1) ---+
//   compute    Q K(n), softmax, P'   |   P' V(n)   |   Q K(n+1) ...
//           ^ K(n) landed              ^ V(n) landed
#pragma once

#include "quantized/fp8_weights.hpp"
#include "sm80/quantized/int8_weights.hpp"
#include "sm80/quantized/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct Int8Schedule {
  using Step = Products<Config, Score, Arch>;
  using Weights = std::conditional_t<Config::kIsE4m3V, Fp8Weights<Config, Score, Arch>,
                                     QuantizedWeights<Config, Score, Arch>>;
  using QScales = typename Operands<Config, Score, Arch>::QScales;
  static constexpr int kN = Config::kBlockN, kRows = Config::kRows;
  static constexpr int kKeyBlocks = Step::kKeyBlocks, kStages = Config::kStages;
  static constexpr float kMinRowMax = -3e38f;  // replaces -inf once a row has seen a tile

  Operands<Config, Score, Arch>& in;
  Result<Config, Score, Arch>& out;

  float magic[kRows] = {};  // how many times O contains kMagic
  int stage = 1;            // of the previous tile, then of this one

  CUTE_DEVICE Int8Schedule(Operands<Config, Score, Arch>& in, Result<Config, Score, Arch>& out)
      : in(in), out(out) {}

  CUTE_DEVICE void run() {
    int key = in.range.begin;
    int const end = in.range.end;
    begin(key);
    while (key < end) {
      // Full tiles, without a look at the range, then one tile that may be partial.
      int const full_end = is_full(key) ? in.range.full_end : key;
      for (; key < full_end; key += kN) step(key, end, std::true_type{});
      if (key < end) {
        step(key, end, std::false_type{});
        key += kN;
      }
    }
    Weights::subtract_magic(as_rows(out.acc_o), magic);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float& max = out.softmax.rows[i].max;
      if (max <= kMinRowMax) max = -kInf;
    }
  }

  // Processes a key tile. is_full: no key of it is masked.
  template <class IsFull>
  CUTE_DEVICE void step(int key, int end, IsFull is_full) {
    auto const q_scales = in.q_scales();
    begin_tile(key, key + kN, key + kN < end);
    typename Weights::P p;
    float factors[kRows];
    softmax(key, is_full, q_scales, p, factors);
    begin_pv(key + kN);
    Weights::multiply(p, opaque(v_rows()), factors, in.start, out.acc_o, magic);
    if constexpr (Weights::kMagicTiles > 0) {
      constexpr int kMagicKeys = Weights::kMagicTiles * kN;
      unpredicated_if((key & (kMagicKeys - 1)) == kMagicKeys - kN,
                      [&] { Weights::subtract_magic(as_rows(out.acc_o), magic); });
    }
  }

  // Copies the first tile and rounds Q. The second stages overwrite Q.
  CUTE_DEVICE void begin(int key) {
    if constexpr (kStages == 2) {
      in.copy.copy_tile(true, key, in.copy.scales_source(key), 0);
    } else {
      in.copy.copy_k(key, 0);
    }
    in.prepare_q();
  }

  // After it, K and scales of the tile are full; with two stages V as well. The buffers of the
  // previous tile, or of V, are empty.
  CUTE_DEVICE void begin_tile(int key, int next, bool has_next) {
    stage = kStages == 2 ? stage ^ 1 : 0;
    char const* next_scales = nullptr;
    if constexpr (kStages == 2) next_scales = in.copy.scales_source(next);
    Arch::template cp_async_wait_group<0>();
    Arch::sync();  // K and scales full; V, or the other buffers, empty
    if constexpr (kStages == 2) {
      in.copy.copy_tile(has_next, next, next_scales, stage ^ 1);
    } else {
      in.copy.copy_v(key, 0);
    }
  }

  // After it, V is full.
  CUTE_DEVICE void begin_pv(int next) {
    if constexpr (kStages == 1) {
      Arch::template cp_async_wait_group<0>();
      Arch::sync();  // V full; K and scales empty
      in.copy.copy_k(next, 0);
    }
  }

  // scores.is_full() without a separate branch, which would take four more instructions.
  CUTE_DEVICE bool is_full(int key) const {
    TileRange const& range = in.range;
    bool const is_behind = key >= range.full_begin, is_before = key < range.full_end;
    return !Score::kIsGeneral && (is_behind & is_before);
  }

  CUTE_DEVICE auto const& scales(int key) const {
    return in.shared.block.scales[Config::place_of_scales(key)];
  }
  // Scales that this thread multiplies by.
  CUTE_DEVICE auto const& own_scales(int key) const { return Weights::own(scales(key)); }
  CUTE_DEVICE auto k_rows() const { return in.k_rows + stage * Config::kKStride; }
  CUTE_DEVICE auto v_rows() const { return in.v_rows + stage * Config::kVStride; }

  // From Q and K of a tile to P.
  template <class IsFull>
  CUTE_DEVICE void softmax(int key, IsFull is_full, QScales const& q_scales, typename Weights::P& p,
                           float (&factors)[kRows]) {
    auto& softmax = out.softmax;
    typename Weights::W w;
    typename Weights::OfThread of_thread;
    float row_max[kRows];
    if constexpr (Score::kIsGeneral) {
      typename Step::S acc_s;
      auto const s = as_rows(acc_s);
      auto const units = scores(key, 0, is_full, in.units(key), acc_s);
      Weights::subtract_magic(as_rows(out.acc_o), magic);
      softmax.template update_max_checked<Weights::kLog2Headroom>(s, as_rows(out.acc_o),
                                                                  in.log2_scale);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].row_max_ref();
      Weights::softmax_weights(s, row_max, units, own_scales(key), is_full, 0, w, of_thread);
    } else {
      // Computes the weights once, or twice if the row max has to be updated (almost never).
      // opaque: a loop of a count that the compiler cannot know keeps one copy of the body.
      CUTE_NO_UNROLL
      for (int updates = opaque(0);; ++updates) {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].max;
        softmax_weights(key, is_full, q_scales, row_max, w, of_thread);
        if (!Arch::any(!Weights::are_small(of_thread.sums)) || updates > 0) break;
        update_row_max(key, is_full, of_thread.sums);
      }
    }
    Weights::round(w, of_thread, softmax, own_scales(key), p, factors);
  }

  // Recomputes S and updates the row max of rows with weights that are too large.
  template <class IsFull>
  CUTE_DEVICE void update_row_max(int key, IsFull is_full, typename Weights::Sums const& sums) {
    auto& softmax = out.softmax;
    int const large = opaque(Weights::large_rows(sums));
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
      // Other rows keep their row max: their results must not depend on this row.
      unpredicated_if(large >> i & 1, [&] {
        Weights::subtract_magic_of_row(as_rows(out.acc_o), magic, i);
        softmax.rescale(as_rows(out.acc_o), {true, max[i]}, i, 1.0f);
      });
      // For a row that has seen no visible key yet: -inf minus a row max of -inf would be NaN.
      softmax.rows[i].max = fmaxf(softmax.rows[i].max, kMinRowMax);
    }
    Arch::sync_warp();  // quads have diverged
  }

  // Computes w, one key block at a time.
  template <class IsFull>
  CUTE_DEVICE void softmax_weights(int key, IsFull is_full, QScales const& q_scales,
                                   float const (&row_max)[kRows], typename Weights::W& w,
                                   typename Weights::OfThread& of_thread) const {
    auto const of_tile = in.units(key, q_scales);
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) {
      typename Step::S s;
      // Without it, the compiler interleaves the key blocks, and S of all of them takes registers.
      if (j > 0) Arch::sync_warp();
      auto const units = scores(key, j, is_full, of_tile, s);
      Weights::softmax_weights(as_rows(s), row_max, units, own_scales(key), is_full, j, w,
                               of_thread);
    }
  }

  // S of key block j, with score_mod and mask applied. Returns its units: `units`, except for NaN.
  template <class IsFull, class Units>
  CUTE_DEVICE auto scores(int key, int j, IsFull is_full, Units units, typename Step::S& s) const {
    // opaque: without it, sm89/int8_fp8 d128 128x64x4 has 24 bytes of local memory.
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
