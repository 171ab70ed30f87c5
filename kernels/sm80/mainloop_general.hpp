// The general schedule of the mma.sync forward kernel: one slice's code for all slices.
//
// The terms of the general score are a thousand instructions a slice, nearly all of which a call
// jumps over. The slices of a tile cannot each have a copy of them, as in mainloop_pipelined.hpp:
// the code would not fit the instruction cache, and what is left to execute would wait for its
// instructions. So the loop is one over slices. In iteration j:
//
//   tensor cores   P V(j-1)  Q K(j+1)        P V(j)  Q K(j+2)
//   the rest            terms, weights(j)         terms, weights(j+1)
//
// K and V have two buffers each. A tile's copy begins as soon as nobody reads what was there, and
// has the time of a tile:
//
//   cp.async   V(n+1), once P V(n-1) is done        K(n+2), once Q K(n) is done
//   compute    first slice of tile n           ...  last slice of tile n
//                ^ V(n) landed                        ^ K(n+1) landed
#pragma once

#include "sm80/config.hpp"

namespace cutlass_attn::sm80 {

// `Loop` is the MainloopForward that has the operands, O and the softmax state.
template <class Config, class Arch, class Loop>
struct GeneralSchedule {
  static constexpr int kN = Config::kBlockN, kSlice = Loop::kSlice, kSlices = Loop::kSlices;
  static constexpr int kKeys = kSlice / 4;  // of a thread
  static_assert(kSlices > 1);

  Loop& loop;

  CUTE_DEVICE void run() {
    loop.begin_pipelined();
    typename Loop::Products next;  // Q K of the slice after
    loop.template product_qk<1>(0, 0, &next);
    loop.copy_k(loop.range.begin + kN, 1);
    int stage = 0, slice = 0;  // of the tile, the slice in it
    for (int key = loop.range.begin; key < loop.range.end; key += kSlice) {
      int const next_slice = slice + 1 == kSlices ? 0 : slice + 1;
      int const next_stage = next_slice == 0 ? stage ^ 1 : stage;
      typename Loop::Scores scores = next;
      loop.score.template scale<Loop::kRows, kKeys>(as_rows(scores));
      if (next_slice == 0) {
        Arch::template async_copy_wait<1>();
        Arch::sync();  // the next K is there for all; this tile's is read by none
        loop.copy_k(key + kSlice + kN, stage);
      }
      if (slice == 0) {
        Arch::template async_copy_wait<1>();
        Arch::sync();  // this tile's V is there for all; that of the tile before is read by none
        loop.copy_v(key + kN, stage ^ 1);
      }
      loop.template product_qk<1>(next_stage, next_slice, &next);
      typename Loop::Words v_first;
      loop.load_v(stage, slice * (kSlice / 16), 0, v_first);
      loop.add_terms(as_rows(scores), key);
      loop.weigh_raised(scores, key);
      loop.softmax.add();
      loop.product_pv(stage, slice, v_first);
      slice = next_slice;
      stage = next_stage;
    }
  }
};

}  // namespace cutlass_attn::sm80
