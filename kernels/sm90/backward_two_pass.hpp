// Backward attention on wgmma and TMA (sm_90a: Hopper) in two passes. Blocks with a tile of keys
// compute dK and dV; blocks with a tile of queries compute dQ. Both recompute P, so a pair of tiles
// takes seven products instead of five. In return nothing is added atomically: dQ needs no fp32
// workspace, and results are deterministic.
//
// Grid:       one block per (batch, KV head, 64 keys), then one per (batch, query head, 128
//             queries)
// Block:      a warpgroup with two producer warps, and two consumer warpgroups (backward_keys.hpp,
//             backward_queries.hpp)
// Registers:  of a consumer: dK, dV or dQ of 64 rows, and S, dP, P or dS of a step
// Shared:     the tiles of the block's own rows, and stages of the two tiles that a step reads
//
// The launches before and after, for row statistics and gradients of sinks, are in
// tile/backward_rows.hpp.
#pragma once

#include "arch/sm90.hpp"
#include "sm90/backward_keys.hpp"
#include "sm90/backward_queries.hpp"
#include "tile/backward_rows.hpp"
#include "tile/quad_rows.hpp"

namespace cutlass_attn::sm90 {

template <class Element, class Shape, class... Options>
struct BackwardTwoPass : KernelDefaults {
  using Traits = cutlass_attn::Traits<Element, Shape, Options...>;
  static_assert(Traits::template are_among<with::PackedRows>);
  using Config = TwoPassConfig<Traits>;
  using SeqInfo = typename Config::SeqInfo;
  using Params = typename Config::Params;
  using Machine = arch::Sm90;
  using Before = BackwardBefore<Element, SeqInfo>;
  using After = BackwardAfter<Element, SeqInfo>;
  static constexpr int kThreads = Config::kThreads, kMinBlocksPerSm = 1;
  static constexpr int kSmemBytes = Config::kSmemBytes;
  static constexpr int kBlockN = Config::kBlockN,
                       kBlockM = kBlockN;  // rows of a block's tile: keys
  static constexpr bool kOverlapsGrids = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    static_assert(Score::kIsIdentity && Score::kIsLinear && !Score::kHasBias && !Score::kHasMask);
    auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(smem);
    int const block = Arch::block();
    if (block < params.key_blocks) {
      run_keys<Score, Arch>(params, params.tile_of_block(block), shared.keys);
    } else {
      int const number = params.query_tile_of(block - int32_t(params.key_blocks));
      run_queries<Score, Arch>(params, number, shared.queries);
    }
  }

 private:
  static constexpr bool kIsVarlen = Config::kIsVarlen;
  static constexpr int kGroupThreads = Config::kGroupThreads;
  static constexpr int kQueries = Config::kBlockQueries;

  template <class Arch>
  CUTE_DEVICE static int group() {
    return Arch::uniform(Arch::thread() / kGroupThreads);
  }

  template <class Score, class Arch>
  CUTE_DEVICE static void run_keys(Params const& params, int number,
                                   typename Config::KeysStorage& shared) {
    Problem const& p = params.problem;
    auto const tile = params.keys.template tile<kBlockN, kIsVarlen, Arch>(p.seq_k, p.batch, number);
    SeqInfo const seq(p, tile.batch);
    SeqLens const lens = seq.lens(p);
    if (tile.begin >= lens.k) return;
    int const end = tile.begin + kBlockN < lens.k ? tile.begin + kBlockN : lens.k;
    IntervalMask const mask = params.template mask<Score::kHasChunks>(lens);
    TileRange const range = mask.query_tiles(tile.begin, end, Config::kBlockM);
    int const tiles = range.end > range.begin ? range.end - range.begin : 0;
    if (Arch::thread() == 0) {
      shared.block.seq = seq;
      shared.block.tile = tile;
      shared.block.range = range;
      init<Arch>(shared);
    }
    cutlass_attn::share_visible<Config, Arch>(mask, tile.begin, kThreads, shared.block.visible,
                                              shared.queries_of_key);
    Arch::sync();  // shared.block full, barriers initialised

    int const steps = params.heads_per_kv * tiles;
    if (group<Arch>() == 0) {
      Arch::template setmaxnreg_dec<Config::kCopyRegisters>();
      KeysProducer<Config, Arch> const producer{params, shared, steps};
      int const warp = Arch::uniform(Arch::thread() / 32);
      if (warp == 0) producer.copy_q();
      if (warp == 1) producer.copy_grad_o();
      return;
    }
    Arch::template setmaxnreg_inc<Config::kComputeRegisters>();
    KeysConsumer<Config, Score, Arch> consumer{params, shared, steps};
    auto const store = [&](Operand const& to, int columns, float scale, auto const& grad) {
      if (to.data == nullptr) return;
      RowTile const& tile = shared.block.tile;
      store_rows<Arch>(shared.block.seq.template keys<Element>(to, tile.head), to.row_stride,
                       tile.begin, shared.block.seq.lens(p).k, columns, scale, grad);
    };
    if (group<Arch>() == 1) {
      typename Config::GradV grad_v;
      consumer.run(grad_v);
      store(params.grad.v, p.head_dim_v, 1.0f, grad_v);
    } else {
      typename Config::GradQk grad_k;
      consumer.run(grad_k, std::true_type{});
      store(params.grad.k, p.head_dim, p.logits.softmax_scale, grad_k);
    }
  }

  template <class Score, class Arch>
  CUTE_DEVICE static void run_queries(Params const& params, int number,
                                      typename Config::QueriesStorage& shared) {
    Problem const& p = params.problem;
    auto const tile =
        params.query_tiles.template tile<kQueries, kIsVarlen, Arch>(p.seq_q, p.batch, number);
    SeqInfo const seq(p, tile.batch);
    SeqLens const lens = seq.lens(p);
    if (tile.begin >= lens.q) return;
    int const end = tile.begin + kQueries < lens.q ? tile.begin + kQueries : lens.q;
    IntervalMask const mask = params.template mask<Score::kHasChunks>(lens);
    if (Arch::thread() == 0) {
      shared.seq = seq;
      shared.tile = tile;
      shared.range = mask.tiles(tile.begin, end, 64);
      init<Arch>(shared);
    }
    share_visible<Arch>(mask, tile.begin, shared);
    Arch::sync();  // shared.tile full, barriers initialised

    if (group<Arch>() == 0) {
      Arch::template setmaxnreg_dec<Config::kCopyRegisters>();
      QueriesProducer<Config, Arch> const producer{params, shared};
      int const warp = Arch::uniform(Arch::thread() / 32);
      if (warp == 0) producer.copy_k();
      if (warp == 1) producer.copy_v();
      return;
    }
    Arch::template setmaxnreg_inc<Config::kComputeRegisters>();
    int const first = (group<Arch>() - 1) * 64;
    QueriesConsumer<Config, Score, Arch> consumer{params, shared, group<Arch>() - 1};
    typename Config::GradQk grad_q;
    consumer.run(grad_q);
    Operand const& to = params.grad.q;
    store_rows<Arch>(shared.seq.template queries<Element>(to, shared.tile.head), to.row_stride,
                     shared.tile.begin + first, shared.seq.lens(p).q, p.head_dim,
                     p.logits.softmax_scale, grad_q);
  }

  // For each query, the keys that it sees; for each warp, the keys that all its queries see. Called
  // by all threads.
  template <class Arch>
  CUTE_DEVICE static void share_visible(IntervalMask const& mask, int first_query,
                                        typename Config::QueriesStorage& shared) {
    CUTE_NO_UNROLL
    for (int i = Arch::thread(); i < kQueries; i += kThreads) {
      int const query = first_query + i;
      bool const is_query = query < mask.seqlen_q;
      shared.keys_of_query[i][0] = is_query ? mask.lo(query) : 0;
      shared.keys_of_query[i][1] = is_query ? mask.hi(query) : 0;
    }
    int const warp = Arch::thread();
    if (warp < kQueries / 16) {
      int const first = first_query + warp * 16, last = first + 15;
      bool const is_whole = last < mask.seqlen_q;
      shared.keys_of_all[warp][0] = is_whole ? mask.lo(last) : 0;
      shared.keys_of_all[warp][1] = is_whole ? mask.hi(first) : 0;
    }
  }

  // Rounds and stores the 64 rows of this warpgroup. first: index in the head. Rows from `rows` on
  // do not exist and are not stored.
  template <class Arch, class Grad>
  CUTE_DEVICE static void store_rows(Element* head, int64_t row_stride, int first, int rows,
                                     int columns, float scale, Grad const& grad) {
    int const thread = thread_of_group<Arch>(), lane = thread % 32;
    int const row = first + thread / 32 * 16 + lane / 4;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      Element* const target = head + int64_t(row + half * 8) * row_stride;
      CUTE_UNROLL
      for (int n = 0; n < Grad::kN; n += 4) {
        uint32_t words[4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          words[i] = Arch::template pack<Element>(grad(2 * half, 0, n + i) * scale,
                                                  grad(2 * half + 1, 0, n + i) * scale);
        }
        store_columns<Arch>(target, words, n, columns, row + half * 8 < rows, lane);
      }
    }
  }

  template <class Arch>
  CUTE_DEVICE static void init(typename Config::KeysStorage& shared) {
    constexpr int kWarpsOfGroup = kGroupThreads / 32;
    Arch::mbarrier_init(&shared.k_full, 1);
    Arch::mbarrier_init(&shared.v_full, 1);
    for (int i = 0; i < Config::kQueryStages; ++i) {
      Arch::mbarrier_init(&shared.q_full[i], 1);
      Arch::mbarrier_init(&shared.grad_o_full[i], 1);
      Arch::mbarrier_init(&shared.q_empty[i], Shape::kWarps);
      Arch::mbarrier_init(&shared.grad_o_empty[i], Shape::kWarps);
    }
    for (int i = 0; i < Config::kPStages; ++i) {
      Arch::mbarrier_init(&shared.p_full[i], kWarpsOfGroup);
      Arch::mbarrier_init(&shared.p_empty[i], kWarpsOfGroup);
    }
    Arch::fence_mbarrier_init();
  }
  template <class Arch>
  CUTE_DEVICE static void init(typename Config::QueriesStorage& shared) {
    Arch::mbarrier_init(&shared.q_full, 1);
    Arch::mbarrier_init(&shared.grad_o_full, 1);
    for (int i = 0; i < Config::kKStages; ++i) {
      Arch::mbarrier_init(&shared.k_full[i], 1);
      Arch::mbarrier_init(&shared.k_empty[i], Shape::kWarps);
    }
    for (int i = 0; i < Config::kVStages; ++i) {
      Arch::mbarrier_init(&shared.v_full[i], 1);
      Arch::mbarrier_init(&shared.v_empty[i], Shape::kWarps);
    }
    Arch::fence_mbarrier_init();
  }
};

}  // namespace cutlass_attn::sm90
