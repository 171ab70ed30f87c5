// The pipelined schedule of the mma.sync forward kernel, for Q in registers.
//
// While a key block goes through softmax, the tensor cores compute the products before and after
// it, in straight-line code:
//
//   tensor cores   P V(j-1)  Q K(j+1)      P V(j)  Q K(j+2)
//   the rest          softmax(j)              softmax(j+1)
//
// K and V have two stages each: tile i is in stage i % 2.
#pragma once

#include "sm80/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct PipelinedSchedule {
  using Step = Products<Config, Score, Arch>;
  static constexpr int kN = Config::kBlockN;
  static constexpr int kKeyBlock = Step::kKeyBlock, kKeyBlocks = Step::kKeyBlocks;
  // S of a tile's last key block and S of the next tile's first one must use different registers.
  static_assert(kKeyBlocks % 2 == 0);

  Operands<Config, Score, Arch>& in;
  Result<Config, Score, Arch>& out;
  int stage = 0, v_stage = 0;  // of the present tile, and of the previous key block
  typename Step::Q q;
  typename Step::S acc_s[2];  // of key block j, and of the next, by j % 2
  typename Step::P p;
  typename Step::Words v_first = {0, 0, 0, 0};
  decltype(in.units(0)) units;
  typename Operands<Config, Score, Arch>::Drawn drawn;  // dropout of 32 keys

  CUTE_DEVICE PipelinedSchedule(Operands<Config, Score, Arch>& in, Result<Config, Score, Arch>& out)
      : in(in), out(out) {}

  CUTE_DEVICE void run() {
    Step::clear_p(p);
    in.begin_with_q(q);
    Step::qk(q, in.k_rows, 0, in.start, acc_s[0]);
    if (in.is_full()) {
      typename Step::Scores scores = Step::in_fp32(acc_s[0]);
      auto units = in.units(key_of(0));
      apply(scores, 0, std::true_type{}, units, in.read_bias(key_of(0), std::true_type{}));
      out.softmax.start(as_rows(scores), units);
    }
    // The first key block has no P V before it. It multiplies the first V by P = 0, so that all
    // tiles run one code. The first V must therefore be in shared memory here.
    Arch::template cp_async_wait_group<0>();
    Arch::sync();
    for (; in.has_tile(); in.tiles.advance()) {
      int from = -1;
      if (in.is_full()) from = run_fast();
      if (from < kKeyBlocks) run_slow(from);
      v_stage = stage;
      stage ^= 1;
    }
    Step::pv(p, v_rows(v_stage), kKeyBlocks - 1, v_first, out.acc_o);
  }

  // The fast path: a tile without masked keys. Stops at a key block whose row max has to be
  // updated, and returns the index of that key block.
  CUTE_DEVICE int run_fast() {
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) {
      if (!step(j, std::true_type{})) return j;
      end_step(j);
    }
    return kKeyBlocks;
  }

  // The slow path: any tile. `from`: the key block at which run_fast() stopped, or -1.
  CUTE_DEVICE void run_slow(int from) {
    CUTE_UNROLL
    for (int j = 0; j < kKeyBlocks; ++j) {
      bool ok = false;
      if (from < j) ok = step(j, std::false_type{});
      if (from <= j) {
        if (!ok) rescale(j);
        end_step(j);
      }
    }
  }

  // Softmax of key block j, overlapped with P V of the previous key block and Q K^T of the next
  // one. Returns false if some weights are too large.
  template <class IsFull>
  CUTE_DEVICE bool step(int j, IsFull is_full) {
    bool const is_first = j == 0, is_last = j + 1 == kKeyBlocks;
    if (is_first) in.look_ahead();
    auto const bias = in.read_bias(key_of(j), is_full);
    Step::pv(p, v_rows(is_first ? v_stage : stage), is_first ? kKeyBlocks - 1 : j - 1, v_first,
             out.acc_o);
    if (is_last) {
      Arch::template cp_async_wait_group<1>();
      Arch::sync();  // the next tile's K full
    }
    Step::qk(q, k_rows(is_last ? stage ^ 1 : stage), is_last ? 0 : j + 1, in.start,
             acc_s[(j + 1) % 2]);
    auto&& scores = Step::in_fp32(acc_s[j % 2]);
    auto units = units_of(j, is_full);
    apply(scores, j, is_full, units, bias);
    bool const ok = out.softmax.softmax_weights(as_rows(scores), units);
    Step::pack(scores, p);
    drop(j);
    // Instructions that need no weights come before the vote, because instructions do not mix
    // across a branch.
    if (is_first) {
      Arch::template cp_async_wait_group<0>();
      Arch::sync();  // this tile's V full; the previous tile's buffers empty
    }
    Step::load_v(v_rows(stage), j, v_first);
    return !Arch::any(!ok);
  }

  // Recomputes S, updates the row max and repeats softmax of key block j.
  CUTE_DEVICE void rescale(int j) {
    auto const bias = in.read_bias(key_of(j), std::false_type{});
    Step::qk(q, k_rows(stage), j, in.start, acc_s[j % 2]);
    auto&& scores = Step::in_fp32(acc_s[j % 2]);
    auto units = in.units(key_of(j));
    if constexpr (Score::kIsLine) {
      // As in step(): the bits of a row must not depend on which row of its warp needs this.
      int const is_full = in.is_full();
      unpredicated_if(is_full, [&] { apply(scores, j, std::true_type{}, units, bias); });
      unpredicated_if(!is_full, [&] { apply(scores, j, std::false_type{}, units, bias); });
    } else {
      apply(scores, j, std::false_type{}, units, bias);
    }
    out.softmax.softmax_weights_rescaled(as_rows(scores), as_rows(out.acc_o), units);
    Step::pack(scores, p);
    drop(j);
  }

  // Applies score_mod and mask to key block j.
  template <class Scores, class IsFull, class Units, class Bias>
  CUTE_DEVICE void apply(Scores& scores, int j, IsFull is_full, Units& units, Bias const& bias) {
    in.add_bias(as_rows(scores), bias);
    in.apply(as_rows(scores), key_of(j), is_full, units);
    in.apply_bits(as_rows(scores), j, stage, is_full);
  }

  // Units of the scores of key block j. In the fast path they are read once for all keys that share
  // them.
  template <class IsFull>
  CUTE_DEVICE auto units_of(int j, IsFull is_full) {
    bool const is_kept = is_full && in.has_units_of_last(j);
    if (!is_kept) units = in.units(key_of(j));
    return units;
  }

  CUTE_DEVICE void drop(int j) {
    if constexpr (Config::kDrops) {
      int const at = j * kKeyBlock % 32;  // from the first of the 32 keys that a draw serves
      in.draw(key_of(j), at, drawn);
      in.drop(key_of(j), at, drawn, p);
    }
  }

  CUTE_DEVICE void end_step(int j) {
    out.softmax.add_sums();
    if (j == 0) {  // copies have branches, so they come where a branch is already
      in.copy_next_bits(stage ^ 1);
      in.copy.copy_k(in.tiles.next_key(), stage ^ 1);
      in.copy.copy_v(in.tiles.next_key(), stage ^ 1);
    }
  }

  CUTE_DEVICE int key_of(int j) const { return in.tiles.key() + j * kKeyBlock; }
  CUTE_DEVICE auto k_rows(int stage) const { return in.k_rows + stage * Config::kKStride; }
  CUTE_DEVICE auto v_rows(int stage) const { return in.v_rows + stage * Config::kVStride; }
};

}  // namespace cutlass_attn::sm80
