// Forward attention on mma.sync (sm_80 and later; used on Ada).
//
// Grid:         one block per kBlockM rows of a head; with fewer queries than that, of all heads of
//               a KV head together (core/scheduler.hpp). With kSplitsKeys, times the splits of the
//               keys (core/key_splits.hpp).
// Block:        kWarpsM warps along M, kWarpsN along N; a loop over tiles of kBlockN keys.
// Warp:         kBlockM / kWarpsM rows, all keys of a tile, the whole head dimension; with several
//               warps along N, a share of the keys for S and of the head dimension for O.
// Accumulation: in fp32, or in fp16 with QkAccumulator or PvAccumulator = half_t
//               (tile/products.hpp). Products in 8 bits: quantized/forward.hpp.
// Registers:    S of a key block or of a tile, P of a key block, O, softmax state of the rows; Q if
//               it fits.
// Shared:       Q, and tiles of K and V, swizzled (tile/swizzle.hpp); filled by cp.async, read by
//               ldmatrix.
// Pipeline:     one of four schedules, each in a file. Q in registers: pipelined.hpp, or
//               general.hpp with the general score. Q in shared memory: tiled.hpp. Several warps
//               along N: split.hpp.
// Mask:         a launch before the kernel makes the map of a bool mask (tile/mask_map.hpp).
#pragma once

#include <type_traits>

#include "core/alignment.hpp"
#include "core/epilogue.hpp"
#include "core/masked_params.hpp"
#include "core/varlen_params.hpp"
#include "sm80/general.hpp"
#include "sm80/operands.hpp"
#include "sm80/pipelined.hpp"
#include "sm80/split.hpp"
#include "sm80/split_keys_params.hpp"
#include "sm80/tiled.hpp"
#include "tile/mask_map.hpp"
#include "tile/merge_splits.hpp"
#include "tile/no_launch.hpp"

namespace cutlass_attn::sm80 {

// Arguments of the kernel, and the launch before it. quantized/forward.hpp specialises this and
// ScheduleOf.
template <class Traits, class ElementK = typename Traits::ElementK>
struct ForwardLaunch {
  using Config = sm80::Config<Traits>;
  using OneSplit = std::conditional_t<Config::kHasBias, BiasForwardParams, ForwardParams>;
  using Unmasked = std::conditional_t<Traits::kSplitsKeys, SplitKeysParams, OneSplit>;
  using Dense = std::conditional_t<Config::kHasMask, MaskedParams<OneSplit>, Unmasked>;
  using Params = std::conditional_t<Config::kIsDense, Dense, VarlenParams>;
  using Before =
      std::conditional_t<Config::kHasMask, MakeMaskMap<Params, Config::kBlockM, Config::kBlockN>,
                         NoLaunch<Params>>;
};

template <class Config, class Score, class Arch, class ElementK = typename Config::ElementK>
struct ScheduleOf {
  using OfQInRegisters = std::conditional_t<Score::kIsGeneral, GeneralSchedule<Config, Score, Arch>,
                                            PipelinedSchedule<Config, Score, Arch>>;
  using OfBlock =
      std::conditional_t<Config::kKeepsQ, OfQInRegisters, TiledSchedule<Config, Score, Arch>>;
  using Type = std::conditional_t<Config::kIsSplit, SplitSchedule<Config, Score, Arch>, OfBlock>;
};

template <class Element, class Shape, class... Options>
struct Forward : KernelDefaults {
  using Traits = cutlass_attn::Traits<Element, Shape, Options...>;
  static_assert(Traits::template are_among<
                typename Traits::Accumulators, with::PackedRows, with::Pages, with::StoredAs<E4M3>,
                with::Bias, with::AnyBias, with::Mask, with::Dropout, with::KeySplits>);
  using Config = sm80::Config<Traits>;
  using Kv = typename Config::Kv;
  static constexpr int kHeadDim = Config::kHeadDim, kHeadDimV = Config::kHeadDimV;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr bool kHasBias = Config::kHasBias, kHasMask = Config::kHasMask;
  static constexpr bool kSplitsKeys = Traits::kSplitsKeys;
  static_assert(Config::kIsPaged || !Config::kIsFp8);
  static_assert(!kSplitsKeys || (Config::kIsDense && !Config::kIsSplit && !kHasBias && !kHasMask));
  using Shared = typename Config::SharedStorage;
  static_assert(Config::kFacts.why_not() == nullptr, "the tile breaks a rule of tile_facts.hpp");
  // Bytes besides the buffers: BlockInfo, and less than 144 bytes of padding.
  static constexpr int kRestBytes = int(sizeof(Shared)) - Config::kFacts.buffer_bytes();
  static_assert(kRestBytes >= int(sizeof(typename Config::BlockInfo)) &&
                kRestBytes < int(sizeof(typename Config::BlockInfo)) + 144);
  using Place = typename Config::Place;
  using TileO = typename Config::TileO;
  using Coord = typename Config::Coord;
  using Params = typename ForwardLaunch<Traits>::Params;
  using Before = typename ForwardLaunch<Traits>::Before;
  using After = NoLaunch<Params>;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMinBlocksPerSm = Config::kMinBlocksPerSm;
  template <class Score>
  static constexpr int min_blocks_per_sm() {
    return Config::template min_blocks_per_sm<Score>();
  }
  static constexpr bool kPacksHeads = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    Coord const tile = params.template tile<kBlockM, Arch>();
    if (!Config::kIsDense && tile.rows <= 0) return;
    static_assert(!(kSplitsKeys && Score::kKeepsMaxLogit), "splits do not merge largest logits");
    using In = Operands<Config, Score, Arch>;
    IntervalMask const mask = params.template mask<Score::kHasChunks>(tile.seq.lens(p));
    TileRange const all = mask.tiles(tile.q_begin, tile.q_end, kBlockN);
    TileRange const own = own_tiles<Arch>(params, all).in_keys(kBlockN);
    // If Q stays in registers, the range of keys does too. The other loops have fewer free
    // registers, and are long enough to hide a read of shared memory.
    TileRange const& range = Config::kKeepsQ ? own : shared.block.range;
    if (Arch::thread() == 0) {
      shared.block.tile = tile;
      if constexpr (kHasMask) {
        int64_t const row = params.map.row_of(tile, params.scheduler);
        shared.block.k = DenseKv<Kv>(p, tile.seq, p.k, tile.head_kv).row(0);
        shared.block.v = DenseKv<Kv>(p, tile.seq, p.v, tile.head_kv).row(0);
        shared.block.words = params.map.words_of(row);
        shared.block.all_bits = params.map.bits_of(row);
      } else {
        shared.block.range = own;
        shared.block.interval = mask.tile_mask(tile.q_begin);
        shared.block.keys = mask.keys(tile.q_begin, tile.q_end);
      }
      if constexpr (kMayDrop<Score>) shared.block.terms.dropout = DropoutMask(p);
      if constexpr (Score::kHasAlibi) shared.block.terms.alibi = Alibi::Tile::of(p, tile, kBlockM);
      In::store_block(params, tile, shared);
      if constexpr (Config::kIsPaged) {
        PagedKv<Kv> const k(p, tile.seq, p.k, tile.head_kv), v(p, tile.seq, p.v, tile.head_kv);
        shared.block.k = k.first;
        shared.block.v = v.first;
        shared.block.pages = k.pages;
        shared.block.by_page = params.by_page;
      }
    }
    if constexpr (kHasBias) find_bias(p, tile, Arch::thread(), shared);
    auto const is_aligned = all_aligned<Score>(p);
    auto const tiles = first_tiles<In, Arch>(params, tile, own, shared);
    In in(p, tile, range, tiles, is_aligned, shared);
    Result<Config, Score, Arch> out;
    clear(out.acc_o);
    bool has_keys = own.begin < own.end;  // visible keys
    if constexpr (kHasMask) has_keys = tiles.has_tile();
    if (has_keys) copy_queries<Arch>(p, tile, is_aligned, shared);
    // If Q stays in registers, the first copies of aligned, dense K and V need nothing from
    // shared.block, except with a mask or if rows are left out. So they start before the barrier
    // that fills it.
    if (!Config::kKeepsQ || !Config::kIsDense || kHasMask || !is_aligned || !has_keys ||
        !own.is_full(tiles.key())) {
      Arch::sync();  // shared.block full
    }
    if (has_keys) {
      in.copy.begin(tiles.key());
      typename ScheduleOf<Config, Score, Arch>::Type(in, out).run();
      Arch::template cp_async_wait_group<0>();  // copies of tiles beyond the last
      out.softmax.complete_sums();
      out.softmax.complete_largest();
      if constexpr (Config::kIsSplit)
        merge_rows<Config, Arch>(shared, Place{Arch::thread()}, out.softmax);
    }

    // opaque: without it, the compiler keeps the thread's place in registers through the loop.
    Place const place{opaque(Arch::thread())};
    if constexpr (kSplitsKeys) {
      // Q, K and V, but for a ticket. block is read after the merge.
      constexpr int kTicketBytes = 128,
                    kTiles = sizeof(shared.q) + sizeof(shared.k) + sizeof(shared.v);
      SplitMerge<Config, Arch, Result<Config, Score, Arch>, kTiles - kTicketBytes> const splits{
          params.splits, place, smem + kTicketBytes};
      if (params.splits.count > 1 && !splits.run(out, *reinterpret_cast<int32_t*>(smem))) return;
    }
    in.complete_max(place, out.softmax);
    float const o_scale = kMayDrop<Score> ? shared.block.terms.dropout.kept_scale : 1.0f;
    finish_rows<Score>(p, shared.block.tile, place, o_scale, out);
    Arch::sync();  // Q, K and V empty
    stage_output<Arch>(place, out.acc_o, smem);
    Arch::sync();  // O full
    TileCopy<Arch, Element, TileO, kThreads>::store_output(smem, p, shared.block.tile, is_aligned,
                                                           place.thread);
  }

 private:
  template <class Score>
  static constexpr bool kMayDrop = Config::kDrops || Score::kIsGeneral;

  // This block's share of the key tiles that its rows see.
  template <class Arch>
  CUTE_DEVICE static TileRange own_tiles(Params const& params, TileRange const& all) {
    if constexpr (kSplitsKeys) {
      return params.splits.share(all, params.splits.split(Arch::block()));
    } else {
      return all;
    }
  }

  // First key tile. Reads nothing of shared memory, which is not full yet.
  template <class In, class Arch>
  CUTE_DEVICE static typename In::Tiles first_tiles(Params const& params, Coord const& tile,
                                                    TileRange const& own, Shared& shared) {
    if constexpr (kHasMask) {
      MaskMap const& map = params.map;
      auto const* const words = map.words_of(map.row_of(tile, params.scheduler));
      return {shared.block.words, Arch::uniform(In::Tiles::before(words, map.key_tiles)), -1};
    } else {
      return {In::Tiles::first_key(own)};
    }
  }

  // Addresses of the bias of each row. Rows beyond the last get the address of the last row.
  CUTE_DEVICE static void find_bias(Problem const& p, Coord const& tile, int thread,
                                    Shared& shared) {
    static_assert(kBlockM <= kThreads);
    if (thread >= kBlockM) return;
    PerLogit const& bias = p.logits.bias;
    int const row = thread < tile.rows ? thread : tile.rows - 1;
    int64_t const at = tile.seq.batch * bias.batch_stride + tile.head(row) * bias.head_stride +
                       tile.query(row) * bias.row_stride;
    bool const is_float = Config::kHasAnyBias && p.logits.bias_dtype == DType::kFloat32;
    shared.block.bias[thread] = static_cast<char const*>(bias.data) + at * (is_float ? 4 : 2);
  }

  // Whether all operands can be copied 16 bytes at a time.
  template <class Score>
  CUTE_DEVICE static auto all_aligned(Problem const& p) {
    if constexpr (Score::kIsGeneral && Config::kMayBeUnaligned) {
      return address_bits(p, sizeof(Element)) % 16 == 0;
    } else {
      return std::true_type{};  // guaranteed by the manifest's alignment
    }
  }

  template <class Arch, class IsAligned>
  CUTE_DEVICE static void copy_queries(Problem const& p, Coord const& tile, IsAligned is_aligned,
                                       Shared& shared) {
    using Copy = TileCopy<Arch, Element, typename Config::TileQ, kThreads>;
    auto const target = Arch::smem_address(&shared) + Config::kQOffset;
    Copy::load_queries(target + Copy::offset(Arch::thread()), p, tile, is_aligned, Arch::thread());
    Arch::cp_async_commit_group();
  }

  template <class Score, class Result>
  CUTE_DEVICE static void finish_rows(Problem const& p, Coord const& tile, Place const& place,
                                      float o_scale, Result& out) {
    auto const o = as_rows(out.acc_o);                                  // (row, column)
    bool const is_first = place.column(0) == 0 && place.warp_n() == 0;  // one thread per row
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      int const row = place.row(i);
      if constexpr (Score::kKeepsMaxLogit) {
        float const largest = out.softmax.largest.of_row[i];
        if (is_first && row < tile.rows) {
          MaxLogit::store(p, tile.seq, tile.head(row), tile.query(row), largest);
        }
      }
      float const factor = finish_row(p, tile.seq, tile.head(row), tile.query(row),
                                      out.softmax.rows[i], 1.0f, is_first && row < tile.rows) *
                           (Config::pv_factor(p, tile.head_kv) * o_scale);
      out.softmax.scale(o, i, factor);
    }
  }

  // Rounds O and writes it over Q.
  template <class Arch, class O>
  CUTE_DEVICE static void stage_output(Place const& place, O const& acc_o, char* smem) {
    if constexpr (Config::kIsFp8) return stage_output_fp8<Arch>(place, acc_o, smem);
    auto const packed = pack_columns<Arch, Element>(acc_o);
    auto const words = as_rows(packed);  // (row, pair of columns)
    int const first = TileO::offset(place.row(0), place.warp_n() * Config::kWarpColumns) +
                      place.column(0) * int(sizeof(Element));
    CUTE_UNROLL
    for (int i = 0; i < words.kRows; ++i) {
      CUTE_UNROLL
      for (int n = 0; n < words.kColumns; ++n) {
        int const row = i % 2 + i / 2 * (2 * Config::kWarpsM);  // in 8 x 8 blocks
        *reinterpret_cast<uint32_t*>(smem + TileO::block8(first, row, n)) = words(i, n);
      }
    }
  }

  // stage_output() for threads with four neighbouring columns of every 16.
  template <class Arch, class O>
  CUTE_DEVICE static void stage_output_fp8(Place const& place, O const& acc_o, char* smem) {
    auto const o = as_rows(acc_o);  // (row, column)
    int const lane = place.thread % 32;
    int const first = TileO::offset(place.row(0), lane % 4 / 2 * 8) + lane % 2 * 8;
    CUTE_UNROLL
    for (int i = 0; i < rows_of<decltype(o)>; ++i) {
      CUTE_UNROLL
      for (int d = 0; d < columns_of<decltype(o)> / 4; ++d) {
        int const row = i % 2 + i / 2 * (2 * Config::kWarpsM);  // in 8 x 8 blocks
        auto* const to = reinterpret_cast<uint32_t*>(smem + TileO::block8(first, row, 2 * d));
        to[0] = Arch::template pack<Element>(o(i, 4 * d), o(i, 4 * d + 2));
        to[1] = Arch::template pack<Element>(o(i, 4 * d + 1), o(i, 4 * d + 3));
      }
    }
  }
};

}  // namespace cutlass_attn::sm80
