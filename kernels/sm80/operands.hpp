// What every schedule of the mma.sync forward kernel works on, and what it leaves behind.
#pragma once

#include <type_traits>

#include "core/score.hpp"
#include "sm80/kv_copy.hpp"
#include "sm80/products.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct Operands {
  using Address = typename Arch::SmemAddress;
  using Shared = typename Config::SharedStorage;
  using Place = typename Config::Place;
  using Step = Products<Config, Score, Arch>;
  // Other calls than aligned ones are for the general score alone, and dense: see manifest.toml.
  using IsAligned = std::conditional_t<Score::kIsGeneral && Config::kIsDense, bool, true_type>;

  Shared& shared;
  TileRange const& range;  // of the tiles of keys, in keys
  FragmentScores<Arch, Score, Place, Config::kRows, Config::kIsTight || Config::kIsSplit,
                 typename Config::Coord> const scores;
  float const log2_scale;
  KvCopy<Config, Arch, IsAligned> copy;
  Address const q_rows, k_rows, v_rows;  // in buffer 0: see products.hpp

  // `tile` and `first_key` are what is, or is about to be, in shared memory too.
  CUTE_DEVICE Operands(Problem const& p, typename Config::Coord const& tile, TileRange const& range,
                       int first_key, IsAligned is_aligned, Shared& shared)
      : shared(shared),
        range(range),
        scores{p,
               score_in_log2<Score>(p, tile.seq.lens(p)),
               Place{Arch::thread()},
               shared.block.tile,
               range,
               shared.block.interval,
               shared.block.dropout},
        log2_scale(scores.score.log2_scale()),
        copy(p, tile, range, first_key, is_aligned, shared),
        q_rows(Step::q_rows(Arch::smem_address(&shared) + Config::kQOffset, scores.place.warp_m(),
                            Arch::thread() % 32)),
        k_rows(Step::k_rows(Arch::smem_address(shared.k), Arch::thread() % 32)),
        v_rows(Step::v_rows(Arch::smem_address(shared.v), Arch::thread() % 32)) {}

  // Calls step(key, is_full) for one tile of keys after the other. is_full: all queries see all of
  // it; there are two copies of a step's code, unless scores.is_full() is a constant.
  template <class Step>
  CUTE_DEVICE void for_each_tile(Step&& step) const {
    for (int key = range.begin; key < range.end; key += Config::kBlockN) {
      if (scores.is_full(key)) {
        step(key, true_type{});
      } else {
        step(key, false_type{});
      }
    }
  }

  // Starts to copy the first tile; Q to registers once it and K have landed.
  CUTE_DEVICE void begin_with_q(typename Step::Q& q) {
    copy.copy_k(range.begin, 0);
    copy.copy_v(range.begin, 0);
    Arch::template async_copy_wait<1>();
    Arch::sync();  // Q and K full
    Step::load_q(q_rows, q);
  }
};

// O, not yet normalised, and the softmax state of its rows.
template <class Config, class Score, class Arch>
struct Result {
  typename Products<Config, Score, Arch>::O acc_o;  // (MMA, M, D)
  SoftmaxRows<Arch, Config::kRows, Config::kMaxWeightSum> softmax;
};

}  // namespace cutlass_attn::sm80
