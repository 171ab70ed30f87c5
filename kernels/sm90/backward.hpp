// Backward attention on wgmma and TMA (sm_90a: Hopper): dK and dV of a tile of keys a block, dQ
// added to memory; P is recomputed.
//
// Grid:       one block per (batch, KV head, tile of kBlockN keys)
// Block:      a warpgroup that copies, of which one warp does (backward_producer.hpp), and two that
//             compute, with 64 keys each (backward_consumer.hpp)
// Loop:       over tiles of kBlockM queries of all query heads that read the KV head
// Registers:  of a warpgroup that computes, dK, dV, S or dP, and its columns of dQ
// Shared:     K, V, two tiles of Q and of dO, swizzled by TMA, and two of dS; read by wgmma
//
// What comes before and after is sm80/backward_rows.hpp, scores and masks sm80/backward_scores.hpp.
#pragma once

#include "arch/sm90.hpp"
#include "sm80/backward_rows.hpp"
#include "sm90/backward_consumer.hpp"
#include "sm90/backward_producer.hpp"

namespace cutlass_attn::sm90 {

template <class Element, int kHeadDim, int kBlockM_, int kBlockN, int kWarps>
struct Backward {
  using Config = BackwardConfig<Element, kHeadDim, kBlockM_, kBlockN, kWarps>;
  using Shared = typename Config::SharedStorage;
  using Params = BackwardParams;
  using Machine = arch::Sm90;
  using Before = sm80::BackwardBefore<Element, DenseSeqInfo>;
  using After = sm80::BackwardAfter<Element, DenseSeqInfo>;
  static constexpr int kThreads = Config::kThreads, kMinBlocksPerSm = 1;
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kBlockM = kBlockN;  // of a block's tile: keys
  static constexpr bool kPacksHeads = false;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    int const number = params.template tile_of_block<false>(Arch::block());
    auto const tile = params.keys.template tile<kBlockN, false, Arch>(p.seq_k, p.batch, number);
    DenseSeqInfo const seq(p, tile.batch);
    SeqLens const lens = seq.lens(p);
    int const end = tile.begin + kBlockN < lens.k ? tile.begin + kBlockN : lens.k;
    IntervalMask const mask = params.template mask<false>(lens);
    TileRange const range = mask.query_tiles(tile.begin, end, Config::kBlockM);
    int const tiles = range.end > range.begin ? range.end - range.begin : 0;

    if (Arch::thread() == 0) {
      shared.block.seq = seq;
      shared.block.tile = tile;
      shared.block.range = range;
      init<Arch>(shared);
    }
    sm80::share_visible<Config, Arch>(mask, tile.begin, shared);
    Arch::sync();  // shared.block full, barriers are there

    int const steps = params.heads_per_kv * tiles;
    int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads) - 1;
    if (group < 0) {
      Arch::template registers_decrease<Config::kCopyRegisters>();
      if (Arch::thread() < 32 && steps > 0) {
        BackwardProducer<Config, Arch>{params, shared, steps}.run();
      }
    } else {
      Arch::template registers_increase<Config::kComputeRegisters>();
      BackwardConsumer<Config, Score, Arch> consumer(params, lens, shared, group);
      consumer.run(steps);
      auto const store = [&](Operand const& to, int columns, float scale, auto const& grad) {
        sm80::store_grad<Config, Arch>(to, columns, scale, shared.block, p, grad,
                                       consumer.thread());
      };
      store(params.grad.v, p.head_dim_v, 1.0f, consumer.grad_v);
      store(params.grad.k, p.head_dim, p.logits.softmax_scale, consumer.grad_k);
    }
  }

 private:
  template <class Arch>
  CUTE_DEVICE static void init(Shared& shared) {
    Arch::barrier_init(&shared.k_full, 1);
    Arch::barrier_init(&shared.v_full, 1);
    for (int i = 0; i < Config::kStages; ++i) {
      Arch::barrier_init(&shared.q_full[i], 1);
      Arch::barrier_init(&shared.grad_o_full[i], 1);
      Arch::barrier_init(&shared.empty[i], kWarps);
    }
    Arch::barrier_init_fence();
  }
};

}  // namespace cutlass_attn::sm90
