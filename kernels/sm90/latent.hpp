// Latent attention (MLA) on wgmma, for many rows on one latent: V is the first columns of K, so
// that one tile serves as both.
//
//   Grid:       64 rows of the queries of the heads that read one KV head, times the splits of
//               their keys, as in sm80/latent.hpp
//   Block:      four warpgroups, each with one role:
//
//                 copies    tiles of 48 latents  ->  K          (latent_producer.hpp)
//                 scores    S = Q K^T, softmax   ->  P          (latent_scores.hpp)
//                 output    O += P V, left half of the columns  (latent_output.hpp)
//                 output    O += P V, right half
//
//   Registers:  output warpgroups: O, and P of a tile; scores' warpgroup: the first columns of Q,
//               and S of a tile
//   Shared:     a ring of tiles, swizzled for wgmma; the other columns of Q; a ring of P, as
//               registers of the A operand, with the factors by which a new row max rescales O
//   Pipeline:   P V of a tile in the output warpgroups overlaps softmax of the next tile, as P is
//               published after Q K^T of the next tile, if that does not wait for a copy. Products
//               of different warpgroups that run together take longer than one after the other: 476
//               us instead of 270 (docs/latent.md). All waits are for mbarriers:
//
//                 k_full:  copies -> scores     p_full:  scores -> output
//                 k_empty: output -> copies     p_empty: output -> scores
//                 q_full:  output -> scores, copies of latents
//
//               The output warpgroups have P of a tile only after the scores are done with its K.
//   Clusters:   two blocks whose tiles of rows have equal keys, or nearly so, such as the 128 heads
//               of a query, copy or convert half of each tile each, for both (latent_cluster.hpp)
//   Conversion: for an 8-bit cache, the copying warps convert the bytes of their tokens to 16 bits
//               (latent_token_producer.hpp). Shared memory then holds two tiles and the bytes of a
//               third
//   Own values: with::OwnValues is for V that is a tensor of its own, in heads of more columns than
//               an output warpgroup of sm90/forward.hpp has registers for. The ring holds tiles of
//               32 keys, of K and V in turn; the scores' warpgroup releases those of K
//   Merge:      by the launch after this one, as in sm80/latent.hpp
//
// Clocks of an SM per tile, at 2048 multiply-adds and 128 bytes of shared memory per clock: tensor
// cores 864 + 768; shared memory 432 for K, 320 for Q, 384 for V, 432 for copies, 144 for P.
#pragma once

#include "arch/sm90.hpp"
#include "sm90/latent_output.hpp"
#include "sm90/latent_producer.hpp"
#include "sm90/latent_scores.hpp"
#include "sm90/latent_token_producer.hpp"
#include "tile/no_launch.hpp"

namespace cutlass_attn::sm90 {

template <class Element, class Shape, class... Options>
struct Latent : KernelDefaults {
  using Traits = cutlass_attn::Traits<Element, Shape, Options...>;
  static_assert(Traits::template are_among<with::StoredAs<DsMla>, with::OwnValues>);
  using Config = LatentConfig<Traits>;
  using Shared = typename Config::SharedStorage;
  using Params = LatentBoxParams;
  using Before = NoLaunch<Params>;
  using After = LatentMerge<Element, Config::kBlockM, Config::kHeadDimV, false>;
  using Machine = arch::Sm90;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kMaxCluster = 2;
  static constexpr int kMinBlocksPerSm = 1;  // without it, ptxas ignores setmaxnreg
  static constexpr bool kPacksHeads = true, kOverlapsGrids = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    auto const tile = params.template tile_of<kBlockM, Arch>(params.unit(Arch::block()));
    if (tile.rows <= 0) return;  // all splits of this tile return; it is in no cluster
    SeqLens const lens = tile.seq.lens(p);
    if (Arch::thread() == 0) {
      IntervalMask const mask = params.template mask<Score::kHasChunks>(lens);
      auto const rows = params.template rows_of_cluster<kBlockM, Arch>(tile);
      TileRange const all = mask.tiles(rows.q_begin, rows.q_end, kBlockN);
      TileRange const own = params.splits.share(all, params.split(Arch::block()));
      shared.block = {tile,
                      all.in_keys(kBlockN),
                      own.begin * kBlockN,
                      own.end * kBlockN,
                      mask.tile_mask(tile.q_begin),
                      {p, p.k, rows, mask}};
      if constexpr (Config::kHasOwnValues) shared.values = {p, p.v, rows, mask};
      init_barriers<Arch>(shared, params.cluster);
    }
    Arch::cluster_sync();  // block full, barriers of all blocks initialised
    int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads);
    if (group == 0) {
      Arch::template setmaxnreg_dec<Config::kCopyRegisters>();
      std::conditional_t<Config::kConverts, LatentTokenProducer<Config, Arch>,
                         LatentProducer<Config, Arch>>{params, shared}
          .run();
    } else if (group == 1) {
      Arch::template setmaxnreg_inc<Config::kScoreRegisters>();
      LatentScores<Config, Score, Arch>(params, shared).run();
    } else {
      Arch::template setmaxnreg_inc<Config::kOutputRegisters>();
      LatentOutput<Config, Score, Arch>{params, shared}.run();
    }
  }

 private:
  template <class Arch>
  CUTE_DEVICE static void init_barriers(Shared& shared, int cluster) {
    constexpr int kWarps = 4, kReaders = Config::kReaders;
    for (int i = 0; i < Config::kStages; ++i) {
      Arch::mbarrier_init(&shared.k_full[i], Config::kUnits);
      Arch::mbarrier_init(&shared.k_empty[i], kReaders * cluster);
    }
    for (int i = 0; i < Config::kWeights; ++i) {
      Arch::mbarrier_init(&shared.p_full[i], kWarps);
      Arch::mbarrier_init(&shared.p_empty[i], kReaders);
    }
    Arch::mbarrier_init(&shared.q_full, kReaders);
    Arch::fence_mbarrier_init();
  }
};

}  // namespace cutlass_attn::sm90
