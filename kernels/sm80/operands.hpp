// The inputs of all schedules of the mma.sync forward kernel, and their result.
#pragma once

#include <type_traits>

#include "core/score.hpp"
#include "quantized/queries.hpp"
#include "sm80/kv_copy.hpp"
#include "tile/dropout.hpp"
#include "tile/products_fp8.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
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

  // Bias of a key block: for each row of a thread, pairs of two neighbouring keys.
  struct BiasPairs {
    uint32_t pairs[Config::kRows][(Step::kKeyBlock + 7) / 8];
  };
  struct NoBias {};
  using Bias = std::conditional_t<kHasBias, BiasPairs, NoBias>;

  // Scales of a thread's rows of Q.
  struct QScales {
    float rows[Config::kRows] = {};
  };

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
      return has_all_keys() && shared.block.alibi.is_on_one_side(tiles.key(), kN);
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

  // Starts the copies of the first tile. Loads Q to registers once Q and K have landed.
  CUTE_DEVICE void begin_with_q(typename Step::Q& q) {
    copy_bits(0);
    copy.copy_k(first_key(), 0);
    copy.copy_v(first_key(), 0);
    Arch::template cp_async_wait_group<1>();
    Arch::sync();  // Q and K full
    if constexpr (Config::kIsInt8) {
      quantize_q(q);
    } else {
      Step::load_q(q_rows, q);
    }
  }

  // Starts the copies of mask bits for the present tile, and for the next one, in the group of the
  // K or V that is copied next.
  CUTE_DEVICE void copy_bits(int stage) {
    if constexpr (kHasMask) copy.copy_bits(tiles.at, stage);
  }
  CUTE_DEVICE void copy_next_bits(int stage) {
    if constexpr (kHasMask) copy.copy_bits(tiles.next, stage);
  }

  // Rounds Q to int8 in half of Q's buffer, while the first K, or K and V, are being copied. After
  // the next barrier the other half may be overwritten.
  CUTE_DEVICE void write_q8() {
    typename Step::Q q;
    Arch::template cp_async_wait_group<1>();
    Arch::sync();  // Q full
    quantize_q(q);
    Arch::sync();  // Q empty
    Step::store_q8(q, shared, scores.place);
  }

  // Address from which qk_of_tile() reads Q.
  CUTE_DEVICE Address q_rows_of_tile() const {
    if constexpr (Config::kIsInt8) {
      return Step::q8_rows(Arch::smem_address(shared.q8), scores.place.warp_m(),
                           scores.place.thread % 32);
    } else {
      return q_rows;
    }
  }

  // Rounds Q to int8 into registers, and stores its scales in shared memory. Q is full.
  CUTE_DEVICE void quantize_q(typename Step::Q& q) {
    using Queries = QuantizedQueries<Config, Score, Arch>;
    float scale[Config::kRows] = {};
    Queries::load(q_rows, q, scale);
    bool const is_first = scores.place.thread % 4 == 0;  // one thread per row
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      if (is_first) shared.block.q_scale[scores.place.row(i)] = scale[i];
    }
    unpredicated_if(needs_q_shift(scores.p), [&] {
      int const columns = (scores.p.head_dim + 31) / 32 * 32;
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        float const sum = Queries::dot(q_rows, i, shared.block.shift, columns);
        if (is_first) shared.block.q_shift[scores.place.row(i)] = sum;
      }
    });
    Arch::sync_warp();  // q_scale and q_shift full, for the threads that have their rows
    Arch::load_shared(Arch::smem_address(shared.block.start[scores.place.thread % 4]), start);
  }

  // Units of the scores of the key block at `key`, after apply().
  CUTE_DEVICE auto units(int key) const {
    if constexpr (kKeepsSums) {
      return units_of(key, [&](int i) { return q_scale_of(i); });
    } else {
      return log2_scale;
    }
  }
  CUTE_DEVICE auto units(int key, QScales const& q_scales) const {
    if constexpr (kKeepsSums) {
      return units_of(key, [&](int i) { return q_scales.rows[i]; });
    } else {
      return log2_scale;
    }
  }
  // The part of units() that is constant over tiles, and can be read before a tile is full.
  CUTE_DEVICE QScales q_scales() const {
    QScales scales;
    if constexpr (kKeepsSums) {
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) scales.rows[i] = q_scale_of(i);
    }
    return scales;
  }

  // Applies score_mod and mask to that key block.
  template <class S, class IsFull, class Units>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full, Units& units) const {
    if constexpr (kKeepsSums && !is_full) units.move_nan(s);
    if constexpr (!kKeepsSums) to_products(s, key);
    apply(s, key, is_full);
  }
  template <class S, class IsFull>
  CUTE_DEVICE void apply(S&& s, int key, IsFull is_full) const {
    // The bits of a mask map include the interval.
    using HasNoInterval = std::conditional_t<kHasMask, std::true_type, IsFull>;
    if constexpr (Score::kHasAlibi) {
      constexpr int kKeys = 4 * columns_of<decltype(s)>;  // of a quad
      scores.apply(s, key, HasNoInterval{},
                   Alibi::KeyBlock<is_full>{shared.block.alibi, key, kKeys});
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
      int const first = key + scores.place.column(0), end = scores.p.seq_k.seqlen;
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        uint16_t const* const row = shared.block.bias[scores.place.row(i)];
        CUTE_UNROLL
        for (int j = 0; j < Step::kKeyBlock / 8; ++j) {
          int const at = is_full || first + j * 8 < end ? first + j * 8 : 0;
          bias.pairs[i][j] = *reinterpret_cast<uint32_t const*>(row + at);
        }
      }
    }
    return bias;
  }
  // Adds the bias to the products of that key block.
  template <class S>
  CUTE_DEVICE void add_bias(S&& s, Bias const& bias) const {
    if constexpr (kHasBias) {
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        CUTE_UNROLL
        for (int n = 0; n < columns_of<decltype(s)>; ++n) {
          auto const bits = uint16_t(bias.pairs[i][n / 2] >> n % 2 * 16);
          s(i, n) =
              scores.score.with_bias(s(i, n), element_to_float<typename Config::Element>(bits));
        }
      }
    }
  }

  // Converts int32 sums to products of Q and K. With other accumulators, scores are products
  // already.
  template <class S>
  CUTE_DEVICE void to_products(S&& s, int key) const {
    if constexpr (Config::kIsInt8) {
      float const k_scale = k_scale_of(key);
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        float const factor = q_scale_of(i) * k_scale;
        float const q_shift = shared.block.q_shift[scores.place.row(i)];
        CUTE_UNROLL
        for (int j = 0; j < columns_of<decltype(s)>; ++j) {
          s(i, j) = fmaf(s(i, j) - quantize::kMagic, factor, q_shift);
        }
      }
    }
  }

  // Draws dropout for the key block at `key`, `at` keys after a multiple of 32. One draw serves two
  // key blocks of 16 keys: the second uses the draw of the first. With the general score, where a
  // call may have no dropout, the second draws again.
  using Drawn = DrawnRows<Arch, Config::kRowBlocks>;
  CUTE_DEVICE void draw(int key, int at, Drawn& drawn) const {
    if (Config::kDrops && at == 0) drawn.draw(shared.block.dropout, scores.place, scores.tile, key);
  }
  CUTE_DEVICE void drop(int key, int at, Drawn& drawn, typename Step::P& p) const {
    DropoutMask const& dropout = shared.block.dropout;
    if constexpr (Config::kDrops) {
      drawn.template drop<Step::kKeyBlock>(dropout, at, p);
    } else if constexpr (Score::kIsGeneral) {
      unpredicated_if(scores.p.dropout.p != 0.0f, [&] {
        drawn.draw(dropout, scores.place, scores.tile, key);
        drawn.template drop<Step::kKeyBlock>(dropout, at, p);
      });
    }
  }

  // Whether logits need Q . shift. If int32 sums go to softmax, only the LSE and sinks need it.
  CUTE_DEVICE static bool needs_q_shift(Problem const& p) {
    return !kKeepsSums || p.softmax_lse || p.logits.sinks;
  }

 private:
  CUTE_DEVICE auto has_all_keys() const {
    if constexpr (kHasMask) {
      return tiles.is_full();
    } else {
      return scores.is_full(tiles.key());
    }
  }

  // Whether int32 sums go to softmax unconverted.
  static constexpr bool kKeepsSums = Config::kIsInt8 && Score::kIsIdentity;
  // Lower bound of a factor: a scale may be 0, and 0 times -inf would be NaN.
  static constexpr float kMinFactor = 0x1p-126f;

  template <class QScaleOf>
  CUTE_DEVICE auto units_of(int key, QScaleOf&& q_scale_of) const {
    SumUnits<Config::kRows> units;
    float const k_scale = k_scale_of(key) * log2_scale;
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      units.factors[i] = fmaf(q_scale_of(i), k_scale, kMinFactor);
    }
    return units;
  }

  // Scale of the key group that this thread has in an accumulator.
  CUTE_DEVICE float k_scale_of(int key) const {
    return shared.block.scales[Config::place_of_scales(key)].of_group(scores.place.thread % 4);
  }

  CUTE_DEVICE float q_scale_of(int i) const { return shared.block.q_scale[scores.place.row(i)]; }
};

// O, not yet normalised, and the softmax state of its rows.
template <class Config, class Score, class Arch>
struct Result {
  typename Products<Config, Score, Arch>::O acc_o;  // (MMA, M, D)
  SoftmaxRows<Arch, Config::kRows, Config::kMaxWeightSum> softmax;
};

}  // namespace cutlass_attn::sm80
