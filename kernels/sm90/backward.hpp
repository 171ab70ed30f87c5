// Backward attention on wgmma and TMA (sm_90a: Hopper). A block computes dK and dV of a tile of
// keys, and adds its part of dQ to global memory; P is recomputed.
//
// Grid:       one block per (batch, KV head, tile of kBlockN keys). Persistent blocks: one per SM,
//             which takes tile after tile (backward_key_tiles.hpp). For the gradient of a bias,
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
#include "sm90/backward_key_tiles.hpp"
#include "tile/backward_rows.hpp"

namespace cutlass_attn::sm90 {

// kIsOrdered: blocks add to dQ in the order of their keys, which makes the sum deterministic.
template <class Element, class Shape, class... Options>
struct Backward : KernelDefaults {
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
  static constexpr bool kIsPersistent = Config::kIsPersistent;
  static constexpr bool kOverlapsGrids = true;

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
    using Tiles = BackwardKeyTiles<Config, Arch>;
    if constexpr (kIsPersistent) {
      if (Arch::thread() == 0) init<Arch>(shared);
    } else {
      RowTile const tile = Tiles::tile_of(
          params, number_of_tile<Config, Arch>(params, block, shared.tiles[0].ticket));
      if (tile.begin >= SeqInfo(p, tile.batch).lens(p).k) return;
      if (Arch::thread() == 0) init<Arch>(shared);
      Tiles::write(params, tile, kThreads, shared.tiles[0]);
    }
    Arch::sync();  // barriers initialised, shared.tiles[0] full
    // Of the only tile. Read before the warpgroups part: read in each of them, D = 128 with a mask
    // has more in local memory.
    int steps = 0;
    if constexpr (!kIsPersistent) steps = shared.tiles[0].num_steps;

    int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads);
    if (Config::kCopiesApart && group == 0) {
      Arch::template setmaxnreg_dec<Config::kCopyRegisters>();
      if (Arch::thread() < 32) Tiles::copy(params, shared);
    } else if (group < Config::kFirstKeysGroup) {
      Arch::template setmaxnreg_dec<Config::kGradQRegisters>();
      BackwardGradQ<Config, Arch>{params, shared}.run(steps);
    } else {
      Arch::template setmaxnreg_inc<Config::kKeysRegisters>();
      run_keys<Score, Arch>(params, shared, group - Config::kFirstKeysGroup, steps);
    }
  }

 private:
  // A consumer warpgroup. steps: of the block's only tile of keys, if it is not persistent.
  template <class Score, class Arch>
  CUTE_DEVICE static void run_keys(Params const& params, Shared& shared, int group, int steps) {
    using Consumer = BackwardConsumer<Config, Score, Arch>;
    Problem const& p = params.problem;
    Ring<Config::kKeyTiles> at;
    Ring<Config::kStages> ring;
    auto const steps_of = [&](int stage) {
      return kIsPersistent ? shared.tiles[stage].num_steps : steps;
    };
    // Whether there is a tile. Then K is full, and the warpgroup has begun.
    auto const take = [&](bool is_first) {
      if (kIsPersistent || steps > 0) {
        Arch::mbarrier_wait(&shared.tile_full[at.stage], at.round);
      }
      if (kIsPersistent && !shared.tiles[at.stage].exists) return false;
      if (steps_of(at.stage) > 0) Consumer::begin(group, is_first);
      return true;
    };
    bool goes_on = take(true);
    while (goes_on) {
      Consumer consumer(params, shared, group, at.stage, ring);
      consumer.run(steps_of(at.stage));
      ring = consumer.ring;
      if constexpr (kIsPersistent) {
        arrive<Arch>(&shared.v_empty);
        at.advance();
        goes_on = take(false);  // before the stores
      } else {
        goes_on = false;
      }
      auto const& tile = consumer.key_tile();
      auto const store = [&](Operand const& to, int columns, float scale, auto const& grad) {
        if constexpr (Config::kDrops) scale *= tile.dropout.kept_scale;
        store_grad<Config, Arch>(to, columns, scale, tile, p, grad, consumer.thread());
      };
      store(params.grad.v, p.head_dim_v, 1.0f, consumer.grad_v);
      store(params.grad.k, p.head_dim, p.logits.softmax_scale, consumer.grad_k);
      if constexpr (kIsPersistent) arrive<Arch>(&shared.tile_empty[consumer.stage]);
    }
  }

  template <class Arch>
  CUTE_DEVICE static void init(Shared& shared) {
    constexpr int kGradQWarps = Config::kGroupThreads / 32;
    for (int i = 0; i < Config::kKeyTiles; ++i) {
      Arch::mbarrier_init(&shared.tile_full[i], 1);
      Arch::mbarrier_init(&shared.tile_empty[i], Shape::kWarps + kGradQWarps);
    }
    Arch::mbarrier_init(&shared.v_full, 1);
    Arch::mbarrier_init(&shared.v_empty, Shape::kWarps);
    for (int i = 0; i < Config::kStages; ++i) {
      Arch::mbarrier_init(&shared.q_full[i], 1);
      Arch::mbarrier_init(&shared.grad_o_full[i], 1);
      Arch::mbarrier_init(&shared.empty[i], Shape::kWarps);
      Arch::mbarrier_init(&shared.grad_s_full[i], Shape::kWarps);
      Arch::mbarrier_init(&shared.grad_s_empty[i], kGradQWarps);
    }
    Arch::fence_mbarrier_init();
  }
};

}  // namespace cutlass_attn::sm90
