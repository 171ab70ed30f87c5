// Forward attention of few queries with many keys on mma.sync: decoding, with or without pages. The
// kernel is bound by reading K and V from memory once.
//
//   Grid:       tiles of kBlockM rows of the packed query heads of a KV head (core/scheduler.hpp),
//               times the splits of their keys (core/key_splits.hpp).
//   Block:      kWarps warps, which share the rows and take tiles of kBlockN keys in turn.
//   Warp:       all rows, some of the key tiles, with a softmax state and an O of its own. There is
//               no barrier between warps before the end.
//   Registers:  Q up to a head dim of 128, S and P of a tile, O.
//   Shared:     per warp: kStages tiles of K and V, filled by cp.async, and the row addresses of
//               the tile that it copies next; Q in the last stage of warp 0, until it is in
//               registers; at the end O of each warp.
//   Pipeline:   kStages - 1 tiles of a warp are in flight while it computes one.
//   Merge:      warps through shared memory; splits through global memory, by the block that
//               finishes last. Both in key order, so that results repeat bitwise.
#pragma once

#include "core/epilogue.hpp"
#include "core/score.hpp"
#include "core/vector.hpp"
#include "sm80/config.hpp"
#include "sm80/decode_params.hpp"
#include "sm80/kv_gather.hpp"
#include "tile/products_fp8.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm80 {

template <class Element, class Shape, class... Options>
struct Decode : KernelDefaults {
  static constexpr int kHeadDim = Shape::kHeadDim, kHeadDimV = Shape::kHeadDimV;
  static constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kN = kBlockN;
  static constexpr int kWarps = Shape::kWarps;
  static_assert(Traits<Element, Shape, Options...>::template are_among<with::StoredAs<E4M3>>);
  // Each warp processes its tiles like a block of one warp.
  using WarpShape = TileShape<kHeadDim, kHeadDimV, kBlockM, kBlockN, 1>;
  using Config = sm80::Config<Traits<Element, WarpShape, with::Pages, Options...>>;
  using Kv = typename Config::Kv;
  using Coord = typename Config::Coord;
  using Place = FragmentPlace<1, 1>;
  using Params = DecodeParams;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinBlocksPerSm = kWarps > 4 ? 1 : 2;
  // With K and V in 8 bits and a head dim of 64, an SM has two blocks if they take at most 128
  // registers, a limit that the compiler would exceed on its own.
  template <class Score>
  static constexpr int min_blocks_per_sm() {
    return kHeadDim <= 64 && !Score::kIsGeneral ? 2 : kMinBlocksPerSm;
  }
  static constexpr bool kPacksHeads = true;
  // Most stages that fit Ada's 99 KB. H200, 16x8192 keys at D = 128: 134 us; 151 us with 2 stages,
  // 136 us with 4 (too large for Ada).
  static constexpr int kStages = kHeadDim + kHeadDimV <= 256 ? 3 : 2;
  static_assert(kBlockM == 16 && kBlockN == 16);

  struct Stage {
    alignas(128) char k[Config::TileK::kBytes];
    alignas(128) char v[Config::TileV::kBytes];
  };
  // O of a warp, after the last tile has been read. Eight floats of padding per row make the
  // threads of an m16n8 fragment write to different banks.
  struct WarpResult {
    float o[kBlockM][kHeadDimV + 8];
    float max[kBlockM], sum[kBlockM];
  };
  union WarpStorage {
    Stage stages[kStages];
    WarpResult result;
  };
  struct Shared {
    WarpStorage warps[kWarps];
    KvRow<Kv> rows[kWarps][kBlockN];  // rows of the tile that a warp copies next
    // Q, if it does not fit in registers.
    alignas(128) char q[Config::kKeepsQ ? 128 : Config::TileQ::kBytes];
    int32_t ticket;  // number of splits that finished before this one
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(!Config::kKeepsQ || Config::TileQ::kBytes <= sizeof(Stage));

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    int const unit = params.splits.unit(Arch::block());  // tile of rows
    int const split = params.splits.split(Arch::block());
    Coord const tile(p, params.scheduler, kBlockM, unit);
    if (tile.rows <= 0) return;  // all splits of this tile return
    SeqLens const lens = tile.seq.lens(p);
    KvGather<Config, Arch> const gather(p, params.by_page, tile, Arch::thread() % 32,
                                        shared.rows[Arch::thread() / 32]);
    IntervalMask const mask = params.template mask<Score::kHasChunks>(lens);
    TileRange const all = mask.tiles(tile.q_begin, tile.q_end, kN);
    TileRange const range = all.in_keys(kN);
    TileMask const interval = mask.tile_mask(tile.q_begin);

    KeyRange const keys = mask.keys(tile.q_begin, tile.q_end);
    WarpKeys<Score, Arch> warp(params, tile, {range, interval, keys}, lens, gather, shared);
    TileRange const own = params.splits.share(all, split);
    warp.run(own.begin, own.end);
    warp.store(shared.warps[Arch::thread() / 32].result);
    Arch::sync();  // results of all warps full
    if (params.splits.count == 1) return finish<Arch>(p, tile, WarpResults{shared});

    Partials const partials(params, unit);
    merge<Arch>(tile, WarpResults{shared},
                [&](int row, int column, SoftmaxRow const& softmax, float const(&o)[4]) {
                  partials.store(split, row, column, softmax, o);
                });
    if (params.splits.is_last<Arch>(unit, shared.ticket)) finish<Arch>(p, tile, partials);
  }

 private:
  struct Masks {
    TileRange const& range;  // key tiles, in keys
    TileMask const& interval;
    KeyRange const& keys;  // that any row sees
  };

  // A warp, and its share of the key tiles.
  template <class Score, class Arch>
  struct WarpKeys {
    using Step = Products<Config, Score, Arch>;
    using Address = typename Arch::SmemAddress;

    Shared& shared;
    Coord const& tile;
    Problem const& p;
    int const warp = Arch::thread() / 32, lane = Arch::thread() % 32;
    TileRange const& range;  // in keys
    FragmentScores<Arch, Score, Place, Config::kRows, false, Coord> const scores;
    float const log2_scale;
    KvGather<Config, Arch> gather;
    Address const stages = Arch::smem_address(&shared.warps[warp]);
    typename Step::Q q;
    typename Step::O acc_o;  // (MMA, M, D)
    SoftmaxRows<Arch, Config::kRows> softmax;

    CUTE_DEVICE WarpKeys(Params const& params, Coord const& tile, Masks const& masks,
                         SeqLens const& lens, KvGather<Config, Arch> const& kv, Shared& shared)
        : shared(shared),
          tile(tile),
          p(params.problem),
          range(masks.range),
          scores{p,           score_in_log2<Score>(p, lens, Config::qk_factor(p, tile.head_kv)),
                 Place{lane}, tile,
                 range,       masks.interval},
          log2_scale(scores.score.log2_scale()),
          gather(kv) {
      gather.set_keys(masks.keys);
    }

    // Processes every kWarps-th of the key tiles [begin, end).
    CUTE_DEVICE void run(int begin, int end) {
      int const first = (begin + warp) * kN, last = end * kN;
      clear(acc_o);
      CUTE_UNROLL
      for (int i = 0; i < kStages - 1; ++i) {
        copy(first + i * kStep, last, i);
        if (i == 0 && begin < end) copy_queries();  // after the keys, which take longer
        Arch::cp_async_commit_group();
      }
      gather.look_up_if(first + (kStages - 1) * kStep, last);
      Arch::template cp_async_wait_group<kStages - 2>();  // Q and the first tile
      Arch::sync();                                       // Q full
      if constexpr (Config::kKeepsQ) {
        Step::load_q(q_rows(), q);
        Arch::sync();  // Q empty
      }
      int stage = 0;
      for (int key = first; key < last; key += kStep) {
        gather.place();
        Arch::template cp_async_wait_group<kStages - 2>();  // this stage
        Arch::sync_warp();  // this stage full; the one before it empty
        int const next = stage == 0 ? kStages - 1 : stage - 1;
        copy_looked_up(key + (kStages - 1) * kStep, last, next);
        Arch::cp_async_commit_group();
        gather.look_up_if(key + kStages * kStep, last);
        if (range.is_full(key)) {
          step(key, stage, std::true_type{});
        } else {
          step(key, stage, std::false_type{});
        }
        stage = stage == kStages - 1 ? 0 : stage + 1;
      }
      Arch::template cp_async_wait_group<0>();  // copies of tiles beyond the last
      Arch::sync_warp();
      softmax.complete_sums();
    }

    // Stores this warp's O and the softmax state of its rows.
    CUTE_DEVICE void store(WarpResult& result) const {
      Place const place{lane};
      auto const o = as_rows(acc_o);  // (row, column)
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        int const row = place.row(i);
        CUTE_UNROLL
        for (int j = 0; j < columns_of<decltype(o)>; ++j)
          result.o[row][Step::o_column(place, j)] = o(i, j);
        if (place.column(0) == 0) {
          result.max[row] = softmax.rows[i].max;
          result.sum[row] = softmax.rows[i].sum;
        }
      }
    }

   private:
    static constexpr int kStep = kWarps * kN;  // between two tiles of the warp
    static constexpr int kStageBytes = sizeof(Stage);

    // Called by all warps.
    CUTE_DEVICE void copy_queries() const {
      using Copy = TileCopy<Arch, Element, typename Config::TileQ, kThreads>;
      Copy::load_queries(q_target() + Copy::offset(Arch::thread()), p, tile, std::true_type{},
                         Arch::thread());
    }
    CUTE_DEVICE Address q_target() const {
      return Config::kKeepsQ ? Arch::smem_address(&shared.warps[0].stages[kStages - 1])
                             : Arch::smem_address(shared.q);
    }
    CUTE_DEVICE Address q_rows() const { return Step::q_rows(q_target(), 0, lane); }

    CUTE_DEVICE Address k_stage(int stage) const { return stages + stage * kStageBytes; }
    CUTE_DEVICE Address v_stage(int stage) const {
      return k_stage(stage) + int(offsetof(Stage, v));
    }

    // Starts no copy for a tile beyond the last.
    CUTE_DEVICE void copy(int key, int end, int stage) {
      gather.look_up_if(key, end);
      gather.place();
      Arch::sync_warp();  // rows of the tile full
      copy_looked_up(key, end, stage);
    }
    CUTE_DEVICE void copy_looked_up(int key, int end, int stage) {
      if (key < end) gather.copy(key, k_stage(stage), v_stage(stage));
    }

    template <class IsFull>
    CUTE_DEVICE void step(int key, int stage, IsFull is_full) {
      typename Step::S acc_s[1];
      if constexpr (Config::kKeepsQ) {
        Step::qk(q, Step::k_rows(k_stage(stage), lane), 0, {}, acc_s[0]);
      } else {
        Step::qk_of_tile(q_rows(), Step::k_rows(k_stage(stage), lane), {}, acc_s);
      }
      auto&& s = Step::in_fp32(acc_s[0]);
      scores.apply(as_rows(s), key, is_full);
      VisibleKeys<Arch, kN> visible;
      if (Score::kIsGeneral && p.mask.elements.data) visible.find(as_rows(s));
      typename Step::Scores weights = s;
      typename Step::P weights_16;
      bool const ok = softmax.softmax_weights(as_rows(weights), log2_scale);
      Step::pack(weights, weights_16);
      if (Arch::any(!ok)) {
        softmax.softmax_weights_rescaled(as_rows(s), as_rows(acc_o), log2_scale);
        Step::pack(s, weights_16);
      }
      softmax.add_sums();
      typename Step::Words v_first;
      auto const v_rows = Step::v_rows(v_stage(stage), lane);
      Step::load_v(v_rows, 0, v_first);
      if constexpr (Score::kIsGeneral) {
        Step::pv(weights_16, v_rows, 0, v_first, acc_o, visible);
      } else {
        Step::pv(weights_16, v_rows, 0, v_first, acc_o);
      }
    }
  };

  // Results of the warps of this block.
  struct WarpResults {
    Shared const& shared;
    CUTE_DEVICE int count() const { return kWarps; }
    CUTE_DEVICE SoftmaxRow softmax(int i, int row) const {
      WarpResult const& result = shared.warps[i].result;
      return {result.max[row], result.sum[row]};
    }
    CUTE_DEVICE float const* o(int i, int row, int column) const {
      return &shared.warps[i].result.o[row][column];
    }
  };

  // Results of the splits of a tile of rows.
  struct Partials {
    static constexpr int64_t kFloats = KeySplits::partial_floats(kBlockM, kHeadDimV);
    float* first;
    int splits;

    CUTE_DEVICE Partials(Params const& params, int unit)
        : first(params.splits.partial(unit, 0, kFloats)), splits(params.splits.count) {}
    CUTE_DEVICE int count() const { return splits; }
    CUTE_DEVICE SoftmaxRow softmax(int i, int row) const {
      float const* const state = state_of(i, row);
      return {state[0], state[1]};
    }
    CUTE_DEVICE float* o(int i, int row, int column) const {
      return first + i * kFloats + row * kHeadDimV + column;
    }
    CUTE_DEVICE float* state_of(int i, int row) const { return o(i, kBlockM, 0) + 2 * row; }
    CUTE_DEVICE void store(int i, int row, int column, SoftmaxRow const& softmax,
                           float const (&values)[4]) const {
      *reinterpret_cast<Quad*>(o(i, row, column)) = {{values[0], values[1], values[2], values[3]}};
      if (column != 0) return;
      state_of(i, row)[0] = softmax.max;
      state_of(i, row)[1] = softmax.sum;
    }
  };

  // Merges all parts and calls visit(row, column, softmax, o) with the result, 4 head-dim columns
  // of a row at a time.
  template <class Arch, class Parts, class Visit>
  CUTE_DEVICE static void merge(Coord const& tile, Parts const& parts, Visit&& visit) {
    constexpr int kQuads = kHeadDimV / 4;
    for (int item = Arch::thread(); item < tile.rows * kQuads; item += kThreads) {
      int const row = item / kQuads, column = item % kQuads * 4;
      SoftmaxRow softmax;
      float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      // Parts whose loads are in flight at a time. With 8 of them, 16 splits took 0.4 us more. At
      // head dim 64, 16 parts take 144 registers: for an 8-bit cache, an SM would have one block
      // instead of two.
      constexpr int kAtOnce = kHeadDim <= 64 ? 8 : 16;
      CUTE_NO_UNROLL
      for (int first = 0; first < parts.count(); first += kAtOnce) {
        CUTE_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          bool const is_there = first + i < parts.count();
          Quad const part =
              is_there ? *reinterpret_cast<Quad const*>(parts.o(first + i, row, column)) : Quad{};
          SoftmaxRow const state = is_there ? parts.softmax(first + i, row) : SoftmaxRow{};
          float factor;
          float const rescale = softmax.merge(state, 1.0f, factor);
          CUTE_UNROLL
          for (int e = 0; e < 4; ++e) o[e] = fmaf(part.values[e], factor, o[e] * rescale);
        }
      }
      visit(row, column, softmax, o);
    }
  }

  // Merges all parts to the result of the call.
  template <class Arch, class Parts>
  CUTE_DEVICE static void finish(Problem const& p, Coord const& tile, Parts const& parts) {
    merge<Arch>(tile, parts, [&](int row, int column, SoftmaxRow softmax, float const(&o)[4]) {
      float const factor =
          finish_row(p, tile.seq, tile.head(row), tile.query(row), softmax, 1.0f, column == 0) *
          Config::pv_factor(p, tile.head_kv);
      if (column >= p.head_dim_v) return;
      uint32_t const words[2] = {Arch::template pack<Element>(o[0] * factor, o[1] * factor),
                                 Arch::template pack<Element>(o[2] * factor, o[3] * factor)};
      auto* const target =
          reinterpret_cast<uint32_t*>(tile.template row_of<Element>(p.o, row) + column);
      target[0] = words[0];
      target[1] = words[1];
    });
  }
};

}  // namespace cutlass_attn::sm80
