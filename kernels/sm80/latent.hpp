// Latent attention (MLA) on mma.sync: V is the first columns of K, so that one tile serves as both.
// Up to a few times 16 rows, the kernel is bound by reading the latents from memory once.
//
//   Grid:       kBlockM rows of the queries of the heads that read one KV head, packed (core/
//               scheduler.hpp), times the splits of their keys (core/key_splits.hpp). With lists
//               of keys the rows are heads of one query.
//   Block:      kWarpsM x kWarpsD warps. Warps along M have 16 rows each. Warps along D share rows
//               and divide the columns of a tile of keys. With four warps along D:
//
//                    K     0        128       256       384       512  528  544  560  576
//                          | slice of 0 | 1 |   2    |    3    | tails: 0 | 1 | 2 | 3 |
//                          '------------- V -------------'
//
//   Warp:       16 rows, a slice, which is its columns of V and of O, and a tail, columns that V
//               lacks. The warps with one slice copy it together; no other warp reads it. S over a
//               warp's columns is a partial sum. Warps that share rows add up their partial sums
//               through shared memory. Each of them then computes softmax of the rows, and
//               multiplies P by its slice.
//   Registers:  Q of the warp's columns, S and P of a tile, O of the slice.
//   Shared:     for each slice kStages tiles, filled by cp.async, and the row addresses of the tile
//               that is copied next; two buffers for partial sums.
//   Pipeline:   kStages - 1 tiles are in flight while one is computed. A tile has two barriers:
//               one of the warps that share a slice (a single warp, if no other has the slice), and
//               one of the warps that share rows:
//
//                 slice full | S of own columns -> buffer n % 2 | rows | sum of all -> P -> O
//
//   Own values: with::OwnValues is for V that is a tensor of its own, in heads of more columns than
//               the registers of one warp can hold. A stage has a slice of V beside that of K.
//   Conversion: for an 8-bit cache (Stored: a format of core/token_format.hpp) the stages hold the
//               bytes of tokens. Between two barriers of the warps of a slice, each warp converts
//               its rows of a stage to the one tile that is computed.
//   Merge:      splits store their results, and a launch after this one merges them
//               (latent/merge.hpp)
#pragma once

#include <type_traits>

#include "core/epilogue.hpp"
#include "core/mask.hpp"
#include "core/score.hpp"
#include "core/traits.hpp"
#include "core/vector.hpp"
#include "latent/merge.hpp"
#include "latent/params.hpp"
#include "latent/rows.hpp"
#include "latent/tokens.hpp"
#include "sm80/config.hpp"
#include "tile/no_launch.hpp"
#include "tile/products_fp8.hpp"
#include "tile/quad_rows.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm80 {

template <class Element, class Shape, class... Options>
struct Latent : KernelDefaults {
  using Traits = cutlass_attn::Traits<Element, Shape, Options...>;
  static_assert(Traits::template are_among<with::OwnValues, with::StoredAs<E4M3>,
                                           with::StoredAs<DsMla>, with::StoredAs<DsMlaV4>>);
  static constexpr bool kHasOwnValues = Traits::template has<with::OwnValues>;
  static constexpr bool kIsFp8 = Traits::kIsFp8;
  using Stored = typename Traits::Kv;
  using Params = LatentParams;
  using Before = NoLaunch<Params>;
  using After = LatentMerge<Element, Shape::kBlockM, Shape::kHeadDimV, Traits::kIsFp8>;
  static constexpr int kHeadDim = Shape::kHeadDim, kHeadDimV = Shape::kHeadDimV;
  static constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kN = kBlockN;
  static constexpr int kWarpsM = Shape::kWarpsM, kWarpsD = Shape::kWarpsN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsD;
  static constexpr int kMinBlocksPerSm = kWarpsM > 1 ? 1 : 2;
  static constexpr bool kPacksHeads = true;
  static constexpr int kSlice = kHeadDimV / kWarpsD;              // a warp's columns of V
  static constexpr int kTail = (kHeadDim - kHeadDimV) / kWarpsD;  // and of K beyond V
  static constexpr bool kHasTail = kTail > 0;
  static constexpr int kWarpKeys = kBlockN / kWarpsM;  // rows of a tile that a warp copies
  static constexpr bool kConverts = !std::is_same_v<Stored, Element> && !kIsFp8;
  static_assert(kHasOwnValues || !kIsFp8);
  static_assert(kBlockM == 16 * kWarpsM && kBlockN % kWarpsM == 0);
  static_assert(kWarpsD == 2 || kWarpsD == 4);
  static_assert(kSlice % 64 == 0 && kTail % 16 == 0);

  // A warp processes its rows and its slice like a block of one warp.
  using SliceShape = TileShape<kSlice, kSlice, 16, kBlockN, 1>;
  using SliceStored = with::StoredAs<std::conditional_t<kIsFp8, E4M3, Element>>;
  struct SliceConfig : Config<cutlass_attn::Traits<Element, SliceShape, with::Pages, SliceStored>> {
    template <class Score>
    static constexpr int key_block() {
      return kBlockN;
    }
  };
  using TileSlice = typename SliceConfig::TileK;
  using TileTail = SwizzledTile<kBlockN, kHasTail ? kTail : 16>;
  using Coord = typename SliceConfig::Coord;
  using Place = FragmentPlace<kWarpsM, kWarpsD>;
  static constexpr int kRows = SliceConfig::kRows;
  static constexpr int kBlocks = kBlockN / 8;  // m16n8 blocks of S

  struct LatentStage {
    alignas(128) char slice[TileSlice::kBytes];
    alignas(128) char tail[kHasTail ? TileTail::kBytes : 128];
  };
  struct KeyAndValueStage {
    alignas(128) char slice[TileSlice::kBytes];
    alignas(128) char tail[TileSlice::kBytes];  // of V
  };
  using Stage = std::conditional_t<kHasOwnValues, KeyAndValueStage, LatentStage>;
  static_assert(!kHasOwnValues || (!kHasTail && !kConverts));
  using PartialSums = Quad[kWarpsM][kWarpsD][kBlocks][32];  // of S, a Quad per m16n8 block
  using Tokens = typename TokenStageOf<Stored, kBlockN, kSlice, kTail, kWarpsD, kConverts>::Type;
  // As many stages as fit Ada's 99 KB. Two blocks then fit an SM of Hopper.
  static constexpr int kSmemOfAda = 99 << 10;
  static constexpr int kTileBytes = kWarpsD * int(sizeof(Stage));
  static constexpr int kStageBytes = kConverts ? int(sizeof(Tokens)) : kTileBytes;
  static constexpr int kStages =
      (kSmemOfAda - 2 * int(sizeof(PartialSums)) - 2048 - (kConverts ? kTileBytes : 0)) /
      kStageBytes;
  static_assert(kStages >= 2);
  using Source = LatentSource<std::conditional_t<kConverts, uint8_t, Stored>>;

  // State of a block. In shared memory, because the main loop is short of registers: in registers,
  // tiles of 64 rows would have 160 bytes of local memory.
  struct BlockInfo {
    Coord tile;
    TileRange range;  // tiles of keys, in keys
    TileMask interval;
    Source source;  // of K, and of V if it is a view of K
  };
  struct NoValues {};
  struct Values {
    Source source_of_values;
    typename Source::Row value_rows[kWarpsM][kWarpsD][kWarpKeys];
  };
  struct NoTokens {};
  struct TokenStages {
    Tokens tokens[kStages];
  };
  struct Shared : std::conditional_t<kConverts, TokenStages, NoTokens>,
                  std::conditional_t<kHasOwnValues, Values, NoValues> {
    Stage stages[kWarpsD][kConverts ? 1 : kStages];
    PartialSums sums[2];
    typename Source::Row rows[kWarpsM][kWarpsD][kWarpKeys];  // addresses of the next tile
    // With lists: bit mask of a stage's rows that are keys. Each warp has the bits of its rows.
    uint32_t present[kWarpsD][kStages][kWarpsM];
    BlockInfo block;
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(kSmemBytes <= kSmemOfAda);

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    int const unit = params.splits.unit(Arch::block());  // tile of rows
    Coord const tile = params.template tile_of<kBlockM, Arch>(unit);
    if (tile.rows <= 0) return;  // all splits of this tile return
    SeqLens const lens = tile.seq.lens(p);
    IntervalMask const mask = params.template mask<Score::kHasChunks>(lens);
    TileRange const all = mask.tiles(tile.q_begin, tile.q_end, kN);
    if (Arch::thread() == 0) {
      shared.block = {tile, all.in_keys(kN), mask.tile_mask(tile.q_begin), {p, p.k, tile, mask}};
      if constexpr (kHasOwnValues) shared.source_of_values = {p, p.v, tile, mask};
    }
    Arch::sync();  // block full

    Warp<Score, Arch> warp(params, lens, shared);
    int const split = params.splits.split(Arch::block());
    TileRange const own = params.splits.share(all, split);
    warp.run(own.begin * kN, own.end * kN);
    if (params.splits.count == 1) {
      warp.finish();
    } else {
      warp.store(After::Result::of(params.splits, unit, split));
    }
  }

 private:
  // O of a warp's slice, and the softmax state of its rows, which is equal in all warps of a row.
  template <class Score, class Arch>
  struct Result {
    typename Products<SliceConfig, Score, Arch>::O acc_o;  // (MMA, M, D)
    SoftmaxRows<Arch, kRows, 4096, Score::kKeepsMaxLogit> softmax;
  };

  template <class Score, class Arch>
  struct Warp {
    using SliceStep = Products<SliceConfig, Score, Arch>;
    using Address = typename Arch::SmemAddress;
    using S = typename SliceStep::S;

    Shared& shared;
    Coord const& tile;
    Problem const& p;
    int const warp = Arch::uniform(Arch::thread() / 32), lane = Arch::thread() % 32;
    int const m = warp / kWarpsD, d = warp % kWarpsD;
    int const slice = d * kSlice, tail = kHeadDimV + d * kTail;  // first columns
    TileRange const& range;                                      // in keys
    FragmentScores<Arch, Score, Place, kRows, false, Coord> const scores;
    float const log2_scale;
    using Tail = std::conditional_t<kHasTail, TileTail, void>;
    using Gather = std::conditional_t<
        kConverts, LatentTokens<Element, Tokens, TileSlice, Tail, kWarpKeys, Arch>,
        std::conditional_t<kHasOwnValues, KeyAndValueRows<Stored, TileSlice, kWarpKeys, Arch>,
                           LatentRows<Element, TileSlice, Tail, kWarpKeys, Arch>>>;
    Gather gather;
    Address const stages = Arch::smem_address(shared.stages[d]);
    typename SliceStep::Q q_slice;
    uint32_t q_tail[kHasTail ? kTail / 16 : 1][1][4];
    Result<Score, Arch> result;

    CUTE_DEVICE Warp(Params const& params, SeqLens const& lens, Shared& shared)
        : shared(shared),
          tile(shared.block.tile),
          p(params.problem),
          range(shared.block.range),
          scores{p,
                 score_in_log2<Score>(p, lens, SliceConfig::qk_factor(p, tile.head_kv)),
                 Place{Arch::thread()},
                 tile,
                 range,
                 shared.block.interval},
          log2_scale(scores.score.log2_scale()),
          gather(gather_of(params.by_page)) {}

    // Processes the tiles of keys [first, last).
    CUTE_DEVICE void run(int first, int last) {
      clear(result.acc_o);
      CUTE_UNROLL
      for (int i = 0; i < kStages - 1; ++i) {
        gather.look_up_if(first + i * kN, last);
        copy_looked_up(first + i * kN, last, i);
      }
      load_queries();  // after the keys, which take longer
      gather.look_up_if(first + (kStages - 1) * kN, last);
      int stage = 0;
      for (int key = first; key < last; key += kN) {
        Arch::template cp_async_wait_group<kStages - 2>();  // this stage
        copy_looked_up(key + (kStages - 1) * kN, last, stage == 0 ? kStages - 1 : stage - 1);
        gather.look_up_if(key + kStages * kN, last);
        if constexpr (kConverts) {
          gather.convert(shared.tokens[stage], slice_of(stage), tail_of(stage));
          sync_slice();  // tile full
        }
        S s;
        multiply_queries(stage, s);
        add_other_columns(shared.sums[(key - first) / kN % 2], s);
        if (range.is_full(key)) {
          step(s, key, stage, std::true_type{});
        } else {
          step(s, key, stage, std::false_type{});
        }
        stage = stage == kStages - 1 ? 0 : stage + 1;
      }
      Arch::template cp_async_wait_group<0>();  // copies of tiles beyond the last
      result.softmax.complete_sums();
      result.softmax.raise_to_largest(as_rows(result.acc_o));
    }

    // Stores the slice of O, LSE, and the largest logits.
    CUTE_DEVICE void finish() {
      Place const place{Arch::thread()};
      auto const o = as_rows(result.acc_o);  // (row, column)
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        int const row = place.row(i);
        bool const is_row = row < tile.rows;
        int const at = is_row ? row : 0;
        bool const writes_lse = is_row && d == 0 && place.column(0) == 0;
        if constexpr (Score::kKeepsMaxLogit) {
          float const largest = result.softmax.rows[i].max;
          if (writes_lse) MaxLogit::store(p, tile.seq, tile.head(at), tile.query(at), largest);
        }
        float const factor = finish_row(p, tile.seq, tile.head(at), tile.query(at),
                                        result.softmax.rows[i], 1.0f, writes_lse) *
                             SliceConfig::pv_factor(p, tile.head_kv);
        store_row(tile.template row_of<Element>(p.o, at), o, i, factor, is_row);
      }
    }

    // Stores the slice of O and the state of its rows, for the launch that merges splits.
    CUTE_DEVICE void store(typename After::Result const& to) const {
      Place const place{Arch::thread()};
      if (m * 16 >= tile.rows) return;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        if (d == 0 && place.column(0) == 0) to.state(place.row(i)) = result.softmax.rows[i];
      }
      to.store(result.acc_o, m, slice / 8, lane);
    }

   private:
    // Stores this warp's columns of row i.
    template <class O>
    CUTE_DEVICE void store_row(Element* target, O const& o, int i, float factor,
                               bool is_row) const {
      auto const pair = [&](int first, int second) {
        return Arch::template pack<Element>(o(i, first) * factor, o(i, second) * factor);
      };
      if constexpr (kIsFp8) {
        // Of every 16 columns, a thread has four neighbouring ones (o_column()).
        CUTE_UNROLL
        for (int j = 0; j < kSlice / 4; j += 4) {
          int const column = slice + SliceStep::o_column(Place{Arch::thread()}, j);
          if (!is_row || column >= p.head_dim_v) continue;
          auto* const words = reinterpret_cast<uint32_t*>(target + column);
          words[0] = pair(j, j + 2);
          words[1] = pair(j + 1, j + 3);
        }
      } else {
        CUTE_UNROLL
        for (int n = 0; n < kSlice / 8; n += 4) {
          uint32_t words[4];
          CUTE_UNROLL
          for (int b = 0; b < 4; ++b) words[b] = pair(2 * (n + b), 2 * (n + b) + 1);
          store_columns<Arch>(target, words, slice / 8 + n, p.head_dim_v, is_row, lane);
        }
      }
    }
    CUTE_DEVICE Gather gather_of(FastDivisor by_page) const {
      int const begin = m * kWarpKeys;
      auto* const rows = shared.rows[m][d];
      LatentColumns const columns{d, slice, tail, p.head_dim};
      if constexpr (kHasOwnValues) {
        return {{p, p.k, by_page, lane, begin, rows, columns, shared.block.source},
                {p,
                 p.v,
                 by_page,
                 lane,
                 begin,
                 shared.value_rows[m][d],
                 {d, slice, tail, p.head_dim_v},
                 shared.source_of_values}};
      } else if constexpr (kConverts) {
        return {p, by_page, lane, begin, rows, columns, shared.block.source};
      } else {
        return {p, p.k, by_page, lane, begin, rows, columns, shared.block.source};
      }
    }
    CUTE_DEVICE Address slice_of(int stage) const {
      return kConverts ? stages : stages + stage * int(sizeof(Stage));
    }
    CUTE_DEVICE Address tail_of(int stage) const {
      return slice_of(stage) + int(offsetof(Stage, tail));
    }

    // Starts the copy of the tile that was looked up, if it exists.
    CUTE_DEVICE void copy_looked_up(int key, int end, int stage) {
      if constexpr (kConverts) {
        gather.place(shared.tokens[stage]);
      } else {
        gather.place();
      }
      sync_slice();  // rows full; the stage computed next full, the one before it empty
      if (key < end) {
        if constexpr (kConverts) {
          gather.copy(shared.tokens[stage]);
        } else {
          gather.copy(slice_of(stage), tail_of(stage));
        }
        if (p.kv.indices) {
          uint32_t const present = gather.present();
          if (lane == 0) shared.present[d][stage][m] = present;
        }
      }
      Arch::cp_async_commit_group();
    }

    // Barriers of the warps that share a slice, and of the warps that share rows.
    CUTE_DEVICE void sync_slice() const {
      if constexpr (kWarpsM == 1) {
        Arch::sync_warp();
      } else {
        Arch::sync(1 + d, 32 * kWarpsM);
      }
    }
    CUTE_DEVICE void sync_rows() const {
      if constexpr (kWarpsM == 1) {
        Arch::sync();
      } else {
        Arch::sync(1 + kWarpsD + m, 32 * kWarpsD);
      }
    }

    // Loads Q of the warp's columns as the A operand, with zeros beyond the last row and column.
    CUTE_DEVICE void load_queries() {
      load_queries(q_slice, slice);
      if constexpr (kHasTail) load_queries(q_tail, tail);
    }
    template <int kSteps>
    CUTE_DEVICE void load_queries(uint32_t (&q)[kSteps][1][4], int begin) const {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const row = Place{Arch::thread()}.row(i);
        bool const is_row = row < tile.rows;
        Element const* const from = tile.template row_of<Element const>(p.q, is_row ? row : 0);
        CUTE_UNROLL
        for (int k = 0; k < 2 * kSteps; ++k) {
          // In 8 bits a thread has four columns of K in a row (tile/products_fp8.hpp).
          int const column =
              begin + (kIsFp8 ? k / 2 * 16 + lane % 4 * 4 + k % 2 * 2 : k * 8 + lane % 4 * 2);
          q[k / 2][0][i + k % 2 * 2] =
              is_row && column < p.head_dim ? *reinterpret_cast<uint32_t const*>(from + column) : 0;
        }
      }
    }

    // S of the warp's columns.
    CUTE_DEVICE void multiply_queries(int stage, S& s) const {
      SliceStep::qk(q_slice, SliceStep::k_rows(slice_of(stage), lane), 0, {}, s);
      if constexpr (kHasTail) {
        // As SliceStep does.
        Address const rows =
            tail_of(stage) + TileTail::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
        CUTE_UNROLL
        for (int i = 0; i < kTail / 16 * kBlocks / 2; ++i) {
          int const k = i / (kBlocks / 2), n = i % (kBlocks / 2);
          uint32_t words[4];
          Arch::ldmatrix_x4(TileTail::block(rows, n, k), words);
          SliceStep::multiply(q_tail[k][0], words, s.block(0, 2 * n));
          SliceStep::multiply(q_tail[k][0], words + 2, s.block(0, 2 * n + 1));
        }
      }
    }

    // Adds the partial sums of the other warps. All warps get equal bits: a sum of two does not
    // depend on their order, and of four every warp adds (0 + 1) and (2 + 3).
    CUTE_DEVICE void add_other_columns(PartialSums& all_sums, S& s) const {
      auto& sums = all_sums[m];
      CUTE_UNROLL
      for (int j = 0; j < kBlocks; ++j) {
        auto const& own = s.block(0, j);
        sums[d][j][lane] = {{own[0], own[1], own[2], own[3]}};
      }
      sync_rows();  // sums of all warps full; the other buffer empty
      CUTE_UNROLL
      for (int j = 0; j < kBlocks; ++j) {
        auto& sum = s.block(0, j);
        Quad const near = sums[d ^ 1][j][lane];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) sum[i] += near.values[i];
        if constexpr (kWarpsD == 4) {
          Quad const far[2] = {sums[d ^ 2][j][lane], sums[d ^ 3][j][lane]};
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) sum[i] += far[0].values[i] + far[1].values[i];
        }
      }
    }

    // Masks list entries that are no keys.
    CUTE_DEVICE void mask_absent(int stage, S& s) const {
      uint32_t present = 0;
      CUTE_UNROLL
      for (int i = 0; i < kWarpsM; ++i) present |= shared.present[d][stage][i];
      auto const rows = as_rows(s);
      CUTE_UNROLL
      for (int j = 0; j < columns_of<decltype(rows)>; ++j) {
        bool const is_key = present >> Place{Arch::thread()}.column(j) & 1;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) rows(i, j) = is_key ? rows(i, j) : -kInf;
      }
    }

    // Softmax of a tile; multiplies P by the warp's slice of V.
    template <class IsFull>
    CUTE_DEVICE void step(S& s, int key, int stage, IsFull is_full) {
      scores.apply(as_rows(s), key, is_full);
      if (p.kv.indices) mask_absent(stage, s);
      VisibleKeys<Arch, kN> visible;
      if (Score::kIsGeneral && p.mask.elements.data) visible.find(as_rows(s));
      S weights = s;
      typename SliceStep::P weights_16;
      bool const ok = result.softmax.softmax_weights(as_rows(weights), log2_scale);
      SliceStep::pack(weights, weights_16);
      if (Arch::any(!ok)) {
        result.softmax.softmax_weights_rescaled(as_rows(s), as_rows(result.acc_o), log2_scale);
        SliceStep::pack(s, weights_16);
      }
      result.softmax.add_sums();
      typename SliceStep::Words v_first;
      auto const v_tile = kHasOwnValues ? tail_of(stage) : slice_of(stage);
      auto const v_rows = SliceStep::v_rows(v_tile, lane);
      SliceStep::load_v(v_rows, 0, v_first);
      if constexpr (Score::kIsGeneral) {
        SliceStep::pv(weights_16, v_rows, 0, v_first, result.acc_o, visible);
      } else {
        SliceStep::pv(weights_16, v_rows, 0, v_first, result.acc_o);
      }
    }
  };
};

}  // namespace cutlass_attn::sm80
