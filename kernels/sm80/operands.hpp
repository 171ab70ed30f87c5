// The inputs of all schedules of the mma.sync forward kernel, and their result.
#pragma once

#include <type_traits>

#include "core/score.hpp"
#include "sm80/bias.hpp"
#include "sm80/kv_copy.hpp"
#include "tile/dropout.hpp"
#include "tile/products_fp8.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm80 {

// quantized/operands.hpp specialises it for Q and K in int8.
template <class Config, class Score, class Arch, class ElementK = typename Config::ElementK>
struct Operands {
  using Address = typename Arch::SmemAddress;
  using Shared = typename Config::SharedStorage;
  using Place = typename Config::Place;
  using Step = Products<Config, Score, Arch>;
  // Only the general score runs calls that are not aligned (the manifest's alignment).
  using IsAligned =
      std::conditional_t<Score::kIsGeneral && Config::kMayBeUnaligned, bool, std::true_type>;

  static constexpr bool kIsReversed = Config::template is_reversed<Score>();
  static constexpr int kN = Config::kBlockN;
  static constexpr bool kHasBias = Config::kHasBias, kHasMask = Config::kHasMask;
  static_assert(kHasBias == Score::kHasBias && kHasMask == Score::kHasMask);
  using RangeTiles = RangeTilesAhead<kN, kIsReversed>;
  using Tiles = std::conditional_t<kHasMask, MapTilesAhead<kN>, RangeTiles>;

  using Bias = typename BiasOf<Config, Step::kKeyBlock>::Type;

  Shared& shared;
  TileRange const& range;  // key tiles, in keys; not set with a mask
  Tiles tiles;             // the present tile and the next
  FragmentScores<Arch, Score, Place, Config::kRows, Config::kIsTight || Config::kIsSplit,
                 typename Config::Coord> const scores;
  float const log2_scale;
  KvCopy<Config, Arch, IsAligned, kIsReversed> copy;
  Address const q_rows, k_rows, v_rows;  // in stage 0: see tile/products.hpp
  typename Step::Start start;

  // `tile` and `tiles` are also stored in shared memory before the next barrier.
  CUTE_DEVICE Operands(Problem const& p, typename Config::Coord const& tile, TileRange const& range,
                       Tiles const& tiles, IsAligned is_aligned, Shared& shared)
      : shared(shared),
        range(range),
        tiles(tiles),
        scores{p,
               score_in_log2<Score>(p, tile.seq.lens(p), Config::qk_factor(p, tile.head_kv)),
               Place{Arch::thread()},
               shared.block.tile,
               range,
               shared.block.interval},
        log2_scale(scores.score.log2_scale()),
        copy(p, tile, range, tiles.key(), is_aligned, shared),
        q_rows(Step::q_rows(Arch::smem_address(&shared) + Config::kQOffset, scores.place.warp_m(),
                            Arch::thread() % 32)),
        k_rows(Step::k_rows(Arch::smem_address(shared.k), Arch::thread() % 32)),
        v_rows(Step::v_rows(Arch::smem_address(shared.v), Arch::thread() % 32)) {}

  // Starts at the first key tile.
  CUTE_DEVICE void begin_tiles() {
    // Read from the range again: kept since the first copy, it would take a register.
    if constexpr (!kHasMask) tiles.at = RangeTiles::first_key(range);
  }
  CUTE_DEVICE int first_key() const {
    if constexpr (kHasMask) {
      return tiles.key();
    } else {
      return RangeTiles::first_key(range);
    }
  }
  // Finds the tile after the present one.
  CUTE_DEVICE void look_ahead() {
    tiles.look_ahead();
    // The compiler does not know that all threads find one tile. Without uniform(), it guards each
    // shuffle and vote in the loop against a diverged warp.
    if constexpr (kHasMask) tiles.next = Arch::uniform(tiles.next);
  }
  // Whether there is a present tile.
  CUTE_DEVICE bool has_tile() const {
    if constexpr (kHasMask) {
      return tiles.has_tile();
    } else {
      return tiles.has_tile(range);
    }
  }

  // Whether no key of the present tile is masked, and, with ALiBi, whether the tile lies on one
  // side of the diagonal.
  CUTE_DEVICE auto is_full() const {
    if constexpr (Score::kHasAlibi) {
      return has_all_keys() && shared.block.terms.alibi.is_on_one_side(tiles.key(), kN);
    } else {
      return has_all_keys();
    }
  }

  // Calls step(key, is_full) for all key tiles in order. is_full: no key of the tile is masked. The
  // code of a step is compiled twice, unless is_full() is a constant.
  template <class Step>
  CUTE_DEVICE void for_each_tile(Step&& step) {
    for (begin_tiles(); has_tile(); tiles.advance()) {
      if (is_full()) {
        step(tiles.key(), std::true_type{});
      } else {
        step(tiles.key(), std::false_type{});
      }
    }
  }

  // Called by the thread that stores the state of the block in shared memory.
  template <class Params>
  CUTE_DEVICE static void store_block(Params const&, typename Config::Coord const&, Shared&) {}

  // Starts the copies of the first tile. Loads Q to registers once Q and K have landed.
  CUTE_DEVICE void begin_with_q(typename Step::Q& q) {
    copy_first_tile();
    Step::load_q(q_rows, q);
  }
  // Called before the second stages are filled, which may lie where Q was.
  CUTE_DEVICE void release_q() const {}

  // Called while the first K is being copied, if Q stays in shared memory.
  CUTE_DEVICE void prepare_q() {}
  // Address from which qk_of_tile() reads Q.
  CUTE_DEVICE Address q_rows_of_tile() const { return q_rows; }

  // Starts the copies of mask bits for the present tile, and for the next one, in the group of the
  // K or V that is copied next.
  CUTE_DEVICE void copy_bits(int stage) {
    if constexpr (kHasMask) copy.copy_bits(tiles.at, stage);
  }
  CUTE_DEVICE void copy_next_bits(int stage) {
    if constexpr (kHasMask) copy.copy_bits(tiles.next, stage);
  }

  // Units of the scores of the key block at `key`, after apply().
  CUTE_DEVICE auto units(int) const {
    if constexpr (Score::kIsLine) {
      return LineUnits<Config::kRows, false>{log2_scale, {}};
    } else {
      return log2_scale;
    }
  }
  // Whether key block j of a tile has the units of the one before it.
  CUTE_DEVICE static constexpr bool has_units_of_last(int) { return false; }

  // Applies score_mod and mask to that key block. `units`: of its scores afterwards.
  template <class S, class IsFull, class Units>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full, Units& units) const {
    if constexpr (Score::kIsLine && is_full) {
      constexpr int kKeys = 4 * columns_of<decltype(s)>;  // of a quad
      Alibi::KeyBlock<true> const block{shared.block.terms.alibi, key, kKeys};
      units = scores.line_units(s, key, block);
    } else {
      apply(s, key, is_full);
    }
  }
  template <class S, class IsFull>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full) const {
    // The bits of a mask map include the interval.
    using HasNoInterval = std::conditional_t<kHasMask, std::true_type, IsFull>;
    if constexpr (Score::kHasAlibi) {
      constexpr int kKeys = 4 * columns_of<decltype(s)>;  // of a quad
      scores.apply(s, key, HasNoInterval{},
                   Alibi::KeyBlock<is_full>{shared.block.terms.alibi, key, kKeys});
    } else {
      scores.apply(s, key, HasNoInterval{});
    }
  }

  // Applies the mask bits to key block j of the present tile, if the map has bits for it. stage:
  // the buffer of the bits.
  template <class S, class IsFull>
  CUTE_DEVICE void apply_bits(S&& s, int j, int stage, IsFull is_full) const {
    if constexpr (kHasMask && !is_full) {
      unpredicated_if(!tiles.is_full(), [&] {
        int const own = opaque(scores.place.thread);
        CUTE_UNROLL
        for (int i = 0; i < Config::kRows; ++i) {
          uint32_t const bits =
              shared.block.bits[stage][Place{own}.row(i)][own % MaskMap::kLanes] >>
              j * columns_of<decltype(s)>;
          CUTE_UNROLL
          for (int n = 0; n < columns_of<decltype(s)>; ++n) {
            s(i, n) = bits >> n & 1 ? s(i, n) : -kInf;
          }
        }
      });
    }
  }

  // Reads the bias of the key block at `key`. Called before products, to hide the latency. Keys
  // beyond the last get the entries of the first keys.
  template <class IsFull>
  CUTE_DEVICE Bias read_bias(int key, IsFull is_full) const {
    Bias bias;
    if constexpr (kHasBias) {
      int const end = is_full ? INT32_MAX : scores.p.seq_k.seqlen;
      bias.read(scores.p.logits, shared.block.bias, scores.place, key, end);
    }
    return bias;
  }
  // Adds the bias to the products of that key block.
  template <class S>
  CUTE_DEVICE void add_bias(S&& s, Bias const& bias) const {
    if constexpr (kHasBias) {
      bool const is_float = Bias::is_float(scores.p.logits);
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        CUTE_UNROLL
        for (int n = 0; n < columns_of<decltype(s)>; ++n) {
          s(i, n) = scores.score.with_bias(s(i, n), bias.entry(i, n, is_float));
        }
      }
    }
  }

  // Converts S of that key block to products of Q and K, which it is already.
  template <class S>
  CUTE_DEVICE void to_products(S&&, int) const {}

  // Draws dropout for the key block at `key`, `at` keys after a multiple of 32. One draw serves two
  // key blocks of 16 keys: the second uses the draw of the first. With the general score, where a
  // call may have no dropout, the second draws again.
  using Drawn = DrawnRows<Arch, Config::kRowBlocks>;
  CUTE_DEVICE void draw(int key, int at, Drawn& drawn) const {
    if (Config::kDrops && at == 0)
      drawn.draw(shared.block.terms.dropout, scores.place, scores.tile, key);
  }
  CUTE_DEVICE void drop(int key, int at, Drawn& drawn, typename Step::P& p) const {
    DropoutMask const& dropout = shared.block.terms.dropout;
    if constexpr (Config::kDrops) {
      drawn.template drop<Step::kKeyBlock>(dropout, at, p);
    } else if constexpr (Score::kIsGeneral) {
      unpredicated_if(scores.p.dropout.p != 0.0f, [&] {
        drawn.draw(dropout, scores.place, scores.tile, key);
        drawn.template drop<Step::kKeyBlock>(dropout, at, p);
      });
    }
  }

  // Adds to each row max what S of the row lacks. `place` is that of this thread.
  template <class Softmax>
  CUTE_DEVICE void complete_max(Place const&, Softmax&) const {}

 protected:
  // Starts the copies of the first tile, and waits for Q and K.
  CUTE_DEVICE void copy_first_tile() {
    copy_bits(0);
    copy.copy_k(first_key(), 0);
    copy.copy_v(first_key(), 0);
    Arch::template cp_async_wait_group<1>();
    Arch::sync();  // Q and K full
  }

 private:
  CUTE_DEVICE auto has_all_keys() const {
    if constexpr (kHasMask) {
      return tiles.is_full();
    } else {
      return scores.is_full(tiles.key());
    }
  }
};

// O, not yet normalised, and the softmax state of its rows.
template <class Config, class Score, class Arch>
struct Result {
  typename Products<Config, Score, Arch>::O acc_o;  // (MMA, M, D)
  SoftmaxRows<Arch, Config::kRows, Config::kMaxWeightSum, Score::kKeepsMaxLogit> softmax;
};

}  // namespace cutlass_attn::sm80
