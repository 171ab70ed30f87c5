// The pipelined schedule of the mma.sync forward kernel, where Q has room in registers.
//
// K and V have two buffers each: the i-th tile is in buffer i % 2. While a slice goes through
// softmax, the tensor cores have the products around it to work on, in one straight stretch of
// code:
//
//   tensor cores   P V(j-1)  Q K(j+1)      P V(j)  Q K(j+2)
//   the rest          weights(j)              weights(j+1)
#pragma once

#include <type_traits>

#include "cute/fragment.hpp"
#include "sm80/config.hpp"

namespace cutlass_attn::sm80 {

// `Loop` is the MainloopForward that has the operands, O and the softmax state. One step: weights
// of slice j beside P V of the slice before and Q K of the one after. It has three parts, so that a
// tile that all queries see whole is one straight stretch of code, with what hardly ever happens
// elsewhere.
template <class Config, class Arch, class Loop>
struct PipelinedSchedule {
  static constexpr int kN = Config::kBlockN, kSlice = Loop::kSlice, kSlices = Loop::kSlices;

  Loop& loop;
  int key, stage = 0, v_stage = 0;  // the tile, its buffers, those of the slice before its first
  typename Loop::Products acc_s[2];
  typename Loop::Words v_first = {0, 0, 0, 0};

  CUTE_DEVICE explicit PipelinedSchedule(Loop& loop_) : loop(loop_), key(loop_.range.begin) {}

  template <int j, class IsFull>
  CUTE_DEVICE bool begin(IsFull is_full) {
    loop.product_pv(j == 0 ? v_stage : stage, (j + kSlices - 1) % kSlices, v_first);
    if constexpr (j + 1 == kSlices) {
      Arch::template async_copy_wait<1>();
      Arch::sync();  // the next K is there for all
      loop.template product_qk<1>(stage ^ 1, 0, acc_s);
    } else {
      loop.template product_qk<1>(stage, j + 1, acc_s + (j + 1) % 2);
    }
    auto&& scores = Loop::in_fp32(acc_s[j % 2]);
    loop.finish_scores(as_rows(scores), key + j * kSlice, is_full);
    return loop.weigh(scores, key + j * kSlice, [&] {
      if constexpr (j == 0) {
        Arch::template async_copy_wait<0>();
        Arch::sync();  // this tile's V is there for all; the tile before is read by none
      }
      loop.load_v(stage, j * (kSlice / 16), 0, v_first);
    });
  }

  template <int j>
  CUTE_DEVICE void again() {
    loop.template product_qk<1>(stage, j, acc_s + j % 2);
    auto&& scores = Loop::in_fp32(acc_s[j % 2]);
    loop.finish_scores(as_rows(scores), key + j * kSlice, false_type{});
    loop.weigh_again(scores, key + j * kSlice);
  }

  template <int j>
  CUTE_DEVICE void end() {
    loop.softmax.add();
    if constexpr (j == 0) {  // copies have branches: they come where one is
      loop.copy_k(key + kN, stage ^ 1);
      loop.copy_v(key + kN, stage ^ 1);
    }
  }

  // A full tile; stops at a slice for which a reference must be raised, and returns its number.
  template <int j = 0>
  CUTE_DEVICE int run_full() {
    if constexpr (j == kSlices) {
      return j;
    } else {
      if (!begin<j>(true_type{})) return j;
      end<j>();
      return run_full<j + 1>();
    }
  }

  // Any tile. `from`: the slice at which run_full() stopped, or -1.
  template <int j = 0>
  CUTE_DEVICE void run_any(int from) {
    if constexpr (j < kSlices) {
      bool ok = false;
      if (from < j) ok = begin<j>(false_type{});
      if (from <= j) {
        if (!ok) again<j>();
        end<j>();
      }
      run_any<j + 1>(from);
    }
  }

  CUTE_DEVICE void run() {
    loop.begin_pipelined();
    loop.template product_qk<1>(0, 0, acc_s);
    if (loop.range.is_full(loop.range.begin)) {
      typename Loop::Scores scores = loop.in_fp32(acc_s[0]);
      loop.finish_scores(as_rows(scores), loop.range.begin, true_type{});
      loop.softmax.start(as_rows(scores), loop.log2_scale);
    }
    // Before the first slice there is no P V to do; it is done with weights of zero, so that all
    // tiles run the same code, on the first V, which therefore has to be there.
    Arch::template async_copy_wait<0>();
    Arch::sync();
    for (; key < loop.range.end; key += kN) {
      int from = -1;
      if (loop.range.is_full(key)) from = run_full();
      if (from < kSlices) run_any(from);
      v_stage = stage;
      stage ^= 1;
    }
    loop.product_pv(v_stage, kSlices - 1, v_first);
  }
};

}  // namespace cutlass_attn::sm80
