// The tiled schedule of the mma.sync forward kernel, for Q in shared memory.
//
// Q K^T of a whole tile comes first, so that Q is read from shared memory once per tile. Then
// softmax of key block j + 1 overlaps P V of key block j. K and V have one stage each:
//
//   cp.async   V(n) ------+   K(n+1) ----------+
//   compute    Q K(n)     |   softmax, P V(n)  |   Q K(n+1) ...
//           ^ K(n) landed   ^ V(n) landed
#pragma once

#include "sm80/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct TiledSchedule {
  using Step = Products<Config, Score, Arch>;
  static constexpr int kN = Config::kBlockN;
  static constexpr int kKeyBlock = Step::kKeyBlock, kKeyBlocks = Step::kKeyBlocks;

  Operands<Config, Score, Arch>& in;
  Result<Config, Score, Arch>& out;

  CUTE_DEVICE TiledSchedule(Operands<Config, Score, Arch>& in, Result<Config, Score, Arch>& out)
      : in(in), out(out) {}

  CUTE_DEVICE void run() {
    in.copy.copy_k(in.first_key(), 0);
    in.prepare_q();
    in.for_each_tile([&](int key, auto is_full) { step(key, is_full); });
  }

  // Processes a key tile. is_full: no key of it is masked.
  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Arch::template cp_async_wait_group<0>();
    Arch::sync();  // K full; V empty
    in.copy_bits(0);
    in.copy.copy_v(key, 0);
    auto bias = in.read_bias(key, is_full);
    typename Step::S acc_s[kKeyBlocks];
    Step::qk_of_tile(in.q_rows_of_tile(), in.k_rows, in.start, acc_s);
    Arch::template cp_async_wait_group<0>();
    Arch::sync();  // V full; K empty
    typename Step::P p;
    typename Operands<Config, Score, Arch>::Drawn drawn;
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) {
      in.draw(key + j * kKeyBlock, at(j), drawn);
      VisibleKeys<Arch, kKeyBlock> visible;
      softmax(acc_s[j], key, j, is_full, drawn, p, bias, visible);
      if (j + 1 < kKeyBlocks) bias = in.read_bias(key + (j + 1) * kKeyBlock, is_full);
      out.softmax.add_sums();
      if (j == 0) {
        in.look_ahead();  // called this late, it takes one register less
        in.copy.copy_k(in.tiles.next_key(), 0);
      }
      // opaque: without it, d128 128x64x4 with softcap has 8 bytes of local memory.
      auto const v_rows = opaque(in.v_rows);
      typename Step::Words v_first;
      Step::load_v(v_rows, j, v_first);
      if constexpr (Score::kIsGeneral) {
        Step::pv(p, v_rows, j, v_first, out.acc_o, visible);
      } else {
        Step::pv(p, v_rows, j, v_first, out.acc_o);
      }
    }
  }

  // Distance of key block j from a multiple of 32.
  CUTE_DEVICE static int at(int j) {
    static_assert(kN % 32 == 0 && 32 % kKeyBlock == 0);
    return j * kKeyBlock % 32;
  }

  // From S of key block j to P.
  template <class IsFull, class Drawn, class Bias, class Visible>
  CUTE_DEVICE void softmax(typename Step::S& acc_s, int key, int j, IsFull is_full, Drawn& drawn,
                           typename Step::P& p, Bias const& bias, Visible& visible) {
    key += j * kKeyBlock;
    auto&& scores = Step::in_fp32(acc_s);
    auto units = in.units(key);
    in.add_bias(as_rows(scores), bias);
    in.apply(as_rows(scores), key, is_full, units);
    if constexpr (Score::kIsGeneral) {
      unpredicated_if(in.scores.may_mask_keys(key), [&] { visible.find(as_rows(scores)); });
    }
    in.apply_bits(as_rows(scores), j, 0, is_full);
    typename Step::Scores weights = scores;  // S stays: its K is already overwritten
    bool const ok = out.softmax.softmax_weights(as_rows(weights), units);
    Step::pack(weights, p);
    in.drop(key, at(j), drawn, p);
    if (!Arch::any(!ok)) return;
    out.softmax.softmax_weights_rescaled(as_rows(scores), as_rows(out.acc_o), units);
    Step::pack(scores, p);
    in.drop(key, at(j), drawn, p);
  }
};

}  // namespace cutlass_attn::sm80
