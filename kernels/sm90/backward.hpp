// Backward attention on wgmma and TMA (sm_90a: Hopper). A block computes dK and dV of a tile of
// keys, and adds its part of dQ to global memory; P is recomputed.
//
// Grid:       one block per (batch, KV head, tile of kBlockN keys). For the gradient of a bias,
//             blocks with tiles of that gradient are interleaved (backward_bias.hpp)
// Block:      two or three consumer warpgroups with 64 keys each (backward_consumer.hpp), one
//             warpgroup that multiplies dQ (backward_grad_q.hpp), and a producer warp
//             (backward_producer.hpp). With two consumer warpgroups the producer has a warpgroup of
//             its own; with three it is a warp of the dQ warpgroup
// Loop:       tiles of kBlockM queries, of all query heads that read the KV head
// Registers:  consumer: dK, dV, and S or dP of 64 keys; dQ warpgroup: 64 queries and 64 columns
//             of dQ
// Shared:     K, V, two or three stages of Q, dO and dS; Q, K, V and dO are swizzled by TMA; all
//             are operands of wgmma
//
// Mask:       a launch before the kernel makes the map of a bool mask (backward_before_mask.hpp);
//             the loop skips query tiles that see no key (backward_map_steps.hpp)
//
// The launches before and after are in tile/backward_rows.hpp, scores and masks in
// tile/backward_scores.hpp.
#pragma once

#include "arch/sm90.hpp"
#include "sm90/backward_before_mask.hpp"
#include "sm90/backward_bias.hpp"
#include "sm90/backward_consumer.hpp"
#include "sm90/backward_grad_q.hpp"
#include "tile/backward_rows.hpp"

namespace cutlass_attn::sm90 {

// kIsOrdered: blocks add to dQ in the order of their keys, which makes the sum deterministic.
template <class Element, class Shape, class... Options>
struct Backward {
  using Traits = cutlass_attn::Traits<Element, Shape, Options...>;
  static_assert(Traits::template are_among<with::PackedRows, with::FixedOrder, with::Mask,
                                           with::Dropout, with::Bias, with::BiasGrad>);
  using Config = BackwardConfig<Traits>;
  using SeqInfo = typename Config::SeqInfo;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr bool kHasMask = Config::kHasMask, kHasBiasGrad = Traits::kHasBiasGrad;
  using Shared = typename Config::SharedStorage;
  using OfBias = BiasGradConfig<Config>;
  using Params = std::conditional_t<kHasBiasGrad, typename OfBias::Params, typename Config::Params>;
  using Machine = arch::Sm90;
  using BeforeRows = BackwardBefore<Element, SeqInfo>;
  using Before = std::conditional_t<kHasMask, BackwardBeforeMask<BeforeRows, kBlockN>, BeforeRows>;
  using After = BackwardAfter<Element, SeqInfo>;
  static constexpr int kThreads = Config::kThreads, kMinBlocksPerSm = 1;
  static constexpr int kBiasBytes = kHasBiasGrad ? int(sizeof(typename OfBias::SharedStorage)) : 0;
  static constexpr int kSmemBytes = kBiasBytes > int(sizeof(Shared)) ? kBiasBytes : sizeof(Shared);
  static constexpr int kBlockM = kBlockN;  // rows of a block's tile: keys
  static constexpr bool kPacksHeads = false;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    int block = Arch::block();
    if constexpr (kHasBiasGrad) {
      int const before = params.bias_blocks_before(block);
      if (before < params.bias_blocks_before(block + 1)) {
        auto& shared = *reinterpret_cast<typename OfBias::SharedStorage*>(smem);
        return run_bias_grad<Config, Score, Arch>(params, shared, before);
      }
      block -= before;
    }
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    auto const tile = params.keys.template tile<kBlockN, Config::kIsVarlen, Arch>(
        p.seq_k, p.batch, number_of_tile<Config, Arch>(params, block, shared));
    SeqInfo const seq(p, tile.batch);
    SeqLens const lens = seq.lens(p);
    if (tile.begin >= lens.k) return;
    int const end = tile.begin + kBlockN < lens.k ? tile.begin + kBlockN : lens.k;
    IntervalMask const mask = params.template mask<false>(lens);
    TileRange const range = mask.query_tiles(tile.begin, end, Config::kBlockM);
    int const tiles = range.end > range.begin ? range.end - range.begin : 0;

    if (Arch::thread() == 0) {
      shared.block.seq = seq;
      shared.block.tile = tile;
      shared.block.range = range;
      if constexpr (Config::kDrops) shared.block.dropout = DropoutMask(p);
      init<Arch>(shared);
    }
    if constexpr (kHasMask) {
      MapSteps<Config, Arch>::share_count(params, tile, shared.block);
    } else {
      share_visible<Config, Arch>(mask, tile.begin, shared);
    }
    Arch::sync();  // shared.block full, barriers initialised

    int const steps = count_steps(params, shared.block, tiles);
    int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads);
    if (Config::kCopiesApart && group == 0) {
      Arch::template setmaxnreg_dec<Config::kCopyRegisters>();
      if (Arch::thread() < 32) BackwardProducer<Config, Arch>(params, shared, steps).run();
    } else if (group < Config::kFirstKeysGroup) {
      Arch::template setmaxnreg_dec<Config::kGradQRegisters>();
      BackwardGradQ<Config, Arch>{params, shared}.run(steps);
    } else {
      Arch::template setmaxnreg_inc<Config::kKeysRegisters>();
      BackwardConsumer<Config, Score, Arch> consumer(params, lens, shared,
                                                     group - Config::kFirstKeysGroup);
      consumer.run(steps);
      auto const store = [&](Operand const& to, int columns, float scale, auto const& grad) {
        if constexpr (Config::kDrops) scale *= shared.block.dropout.kept_scale;
        store_grad<Config, Arch>(to, columns, scale, shared.block, p, grad, consumer.thread());
      };
      store(params.grad.v, p.head_dim_v, 1.0f, consumer.grad_v);
      store(params.grad.k, p.head_dim, p.logits.softmax_scale, consumer.grad_k);
    }
  }

 private:
  template <class Block>
  CUTE_DEVICE static int count_steps(Params const& params, Block const& block, int tiles) {
    if constexpr (kHasMask) {
      return block.num_steps;
    } else {
      return params.heads_per_kv * tiles;
    }
  }

  template <class Arch>
  CUTE_DEVICE static void init(Shared& shared) {
    Arch::mbarrier_init(&shared.k_full, 1);
    Arch::mbarrier_init(&shared.v_full, 1);
    for (int i = 0; i < Config::kStages; ++i) {
      Arch::mbarrier_init(&shared.q_full[i], 1);
      Arch::mbarrier_init(&shared.grad_o_full[i], 1);
      Arch::mbarrier_init(&shared.empty[i], Shape::kWarps);
      Arch::mbarrier_init(&shared.grad_s_full[i], Shape::kWarps);
      Arch::mbarrier_init(&shared.grad_s_empty[i], Config::kGroupThreads / 32);
    }
    Arch::fence_mbarrier_init();
  }
};

}  // namespace cutlass_attn::sm90
