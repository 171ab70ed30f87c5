// The general schedule of the mma.sync forward kernel: all key blocks share one copy of the code.
//
// The general score takes a thousand instructions per key block; a call jumps over nearly all of
// them. If each key block of a tile had its own copy of the code, as in pipelined.hpp, the code
// would not fit the instruction cache, and the instructions that do execute would wait for fetches.
// So the loop runs over key blocks. In iteration j:
//
//   tensor cores   P V(j-1)  Q K(j+1)        P V(j)  Q K(j+2)
//   the rest            score, softmax(j)         score, softmax(j+1)
//
// K and V have two stages each. The copy of a tile starts as soon as its buffer is empty, and has
// the time of one tile to land:
//
//   cp.async   V(n+1), once P V(n-1) is done        K(n+2), once Q K(n) is done
//   compute    first key block of tile n       ...  last key block of tile n
//                ^ V(n) landed                        ^ K(n+1) landed
#pragma once

#include "sm80/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct GeneralSchedule {
  using Step = Products<Config, Score, Arch>;
  static constexpr int kN = Config::kBlockN;
  static constexpr int kKeyBlock = Step::kKeyBlock, kKeyBlocks = Step::kKeyBlocks;
  static_assert(kKeyBlocks > 1);

  Operands<Config, Score, Arch>& in;
  Result<Config, Score, Arch>& out;

  CUTE_DEVICE GeneralSchedule(Operands<Config, Score, Arch>& in, Result<Config, Score, Arch>& out)
      : in(in), out(out) {}

  CUTE_DEVICE void run() {
    typename Step::Q q;
    in.begin_with_q(q);
    typename Step::S next;  // Q K^T of the next key block
    Step::qk(q, in.k_rows, 0, in.start, next);
    in.release_q();
    in.copy.copy_k(in.range.begin + kN, 1);
    int stage = 0, j = 0;  // stage of the tile; key block in the tile
    for (int key = in.range.begin; key < in.range.end; key += kKeyBlock) {
      int const next_j = j + 1 == kKeyBlocks ? 0 : j + 1;
      int const next_stage = next_j == 0 ? stage ^ 1 : stage;
      typename Step::Scores scores = next;
      in.to_products(as_rows(scores), key);
      in.scores.scale(as_rows(scores));
      if (next_j == 0) {
        Arch::template cp_async_wait_group<1>();
        Arch::sync();  // the next tile's K full; this one's empty
        in.copy.copy_k(key + kKeyBlock + kN, stage);
      }
      if (j == 0) {
        Arch::template cp_async_wait_group<1>();
        Arch::sync();  // this tile's V full; the previous tile's empty
        in.copy.copy_v(key + kN, stage ^ 1);
      }
      Step::qk(q, in.k_rows + next_stage * Config::kKStride, next_j, in.start, next);
      auto const v_rows = in.v_rows + stage * Config::kVStride;
      typename Step::Words v_first;
      Step::load_v(v_rows, j, v_first);
      in.scores.apply_terms(as_rows(scores), key);
      VisibleKeys<Arch, kKeyBlock> visible;
      unpredicated_if(in.scores.may_mask_keys(key), [&] { visible.find(as_rows(scores)); });
      out.softmax.softmax_weights_checked(as_rows(scores), as_rows(out.acc_o), in.log2_scale);
      typename Step::P p;
      Step::pack(scores, p);
      typename Operands<Config, Score, Arch>::Drawn drawn;
      in.drop(key, j % (32 / kKeyBlock) * kKeyBlock, drawn, p);
      out.softmax.add_sums();
      pv_of_visible<Step>(p, v_rows, j, v_first, out.acc_o, visible);
      j = next_j;
      stage = next_stage;
    }
  }
};

}  // namespace cutlass_attn::sm80
