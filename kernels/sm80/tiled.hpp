// The tiled schedule of the mma.sync forward kernel, where Q has no room in registers.
//
// Q K^T of a whole tile comes first, so that Q is read from shared memory once a tile; then
// softmax(j+1) of a key block beside P V(j) of the one before. K and V have one buffer each:
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
    in.copy.copy_k(in.range.begin, 0);
    if constexpr (Config::kIsInt8) in.write_q8();
    in.for_each_tile([&](int key, auto is_full) { step(key, is_full); });
  }

  // A tile of keys. is_full: all queries see all of it.
  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Arch::template async_copy_wait<0>();
    Arch::sync();  // K full; V empty
    in.copy.copy_v(key, 0);
    typename Step::S acc_s[kKeyBlocks];
    Step::qk_of_tile(in.q_rows_of_tile(), in.k_rows, acc_s);
    Arch::template async_copy_wait<0>();
    Arch::sync();  // V full; K empty
    typename Step::P p;
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) {
      softmax(acc_s[j], key + j * kKeyBlock, is_full, p);
      out.softmax.add_sums();
      if (j == 0) in.copy.copy_k(key + kN, 0);
      // opaque: or d128 128x64x4 with softcap has 8 bytes of local memory.
      auto const v_rows = opaque(in.v_rows);
      typename Step::Words v_first;
      Step::load_v(v_rows, j, v_first);
      Step::pv(p, v_rows, j, v_first, out.acc_o);
    }
  }

  // From S of the key block that begins at `key` to P.
  template <class IsFull>
  CUTE_DEVICE void softmax(typename Step::S& acc_s, int key, IsFull is_full, typename Step::P& p) {
    auto&& scores = Step::in_fp32(acc_s);
    auto units = in.units(key);
    in.apply(as_rows(scores), key, is_full, units);
    typename Step::Scores weights = scores;  // which stay: their K is overwritten by now
    bool const ok = out.softmax.softmax_weights(as_rows(weights), units);
    in.scores.apply_dropout(as_rows(weights), key);
    Step::pack(weights, p);
    if (!Arch::any(!ok)) return;
    out.softmax.softmax_weights_rescaled(as_rows(scores), as_rows(out.acc_o), units);
    in.scores.apply_dropout(as_rows(scores), key);
    Step::pack(scores, p);
  }
};

}  // namespace cutlass_attn::sm80
