// Backward on mma.sync: dK and dV of a tile of keys a block, dQ added to memory; P is recomputed.
//
//   grid    one block per (batch, KV head, tile of kBlockN keys)
//   block   warps along the keys; beyond head dim 64 two of them share keys, in two roles
//   loop    over tiles of kBlockM queries of all query heads that read the KV head, so dK and dV of
//           grouped heads add up in registers
//
//   a step, for a slice of queries at a time:
//
//     first role   S = K Q^T --> P = exp(S - LSE) --> dV += P dO
//                                     | (smem)
//     second role  dP = V dO^T --> dS = P (dP - delta) --> dK += dS Q
//                                     | (smem)
//     all warps    dQ = dS K, of the step before, added to memory
//
// With dropout P is multiplied by 1 where a weight is kept, not by the kept weights' factor: delta
// is divided by it in advance, and dQ, dK and dV are multiplied by it when they are rounded.
//
// In registers: dK or dV (both without roles), and as much of K or V as BackwardConfig says. In
// shared memory: K, the tiles of Q and dO of this step and of the next one, dS of this step and of
// the one before. One barrier a step. What comes before and after is backward_rows.hpp.
#pragma once

#include "core/opaque.hpp"
#include "sm80/backward_bias.hpp"
#include "sm80/backward_config.hpp"
#include "sm80/backward_params.hpp"
#include "sm80/backward_rows.hpp"
#include "sm80/backward_step.hpp"
#include "tile/quad_rows.hpp"
#include "tile/tile_copy.hpp"

namespace cutlass_attn::sm80 {

template <class Element, int kHeadDim, int kBlockM_, int kBlockN, int kWarps,
          bool kIsGeneral = false, class SeqInfo = DenseSeqInfo, bool kIsOrdered = false,
          bool kDrops = false, bool kHasBiasGrad = false>
struct Backward {
  using Config = BackwardConfig<Element, kHeadDim, kBlockM_, kBlockN, kWarps, kIsGeneral, SeqInfo,
                                kIsOrdered, kDrops, kHasBiasGrad>;
  using Shared = typename Config::SharedStorage;
  using Params = BackwardParams;
  using Before = std::conditional_t<kHasBiasGrad, BackwardBeforeBias<Element, SeqInfo>,
                                    BackwardBefore<Element, SeqInfo>>;
  using After = BackwardAfter<Element, SeqInfo>;
  static constexpr bool kIsVarlen = !std::is_same_v<SeqInfo, DenseSeqInfo>;
  static constexpr int kThreads = Config::kThreads, kMinBlocksPerSm = Config::kMinBlocksPerSm;
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kBlockM = kBlockN;  // of a block's tile: keys
  static constexpr bool kPacksHeads = false;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    RowTile const tile =
        params.keys.tile<kBlockN, kIsVarlen, Arch>(p.seq_k, p.batch, number<Arch>(params, shared));
    SeqInfo const seq(p, tile.batch);
    SeqLens const lens = seq.lens(p);
    if (tile.begin >= lens.k) return;
    int const end = tile.begin + kBlockN < lens.k ? tile.begin + kBlockN : lens.k;
    TileRange const range =
        params.template mask<kIsGeneral>(lens).query_tiles(tile.begin, end, Config::kBlockM);

    if (Arch::thread() == 0) {
      shared.block.seq = seq;
      shared.block.tile = tile;
      shared.block.range = range;
      if constexpr (Config::kMayDrop) shared.block.dropout = DropoutMask(p);
    }
    share_visible<Arch>(params.template mask<kIsGeneral>(lens), tile.begin, shared);
    Arch::sync();  // shared.block full

    BackwardStep<Config, Score, Arch> step(params, lens, shared);
    step.load_keys();
    step.run();
    store<Arch>(params, shared.block, step);
  }

 private:
  // Of this block's tile of keys. In order, blocks wait for those of earlier keys: which those are
  // is up to when blocks begin, so that all that one waits for have begun.
  template <class Arch>
  CUTE_DEVICE static int number(Params const& params, Shared& shared) {
    if constexpr (!kIsOrdered) return params.tile_of_block<kHasBiasGrad>(Arch::block());
    if (Arch::thread() == 0) shared.block.ticket = Arch::fetch_add(params.tickets(), 1);
    Arch::sync();  // the ticket full
    return params.tile_of(shared.block.ticket);
  }

  // Which queries see each key, and each warp's.
  template <class Arch>
  CUTE_DEVICE static void share_visible(IntervalMask const& mask, int first_key, Shared& shared) {
    int const thread = Arch::thread();
    CUTE_NO_UNROLL
    for (int i = thread; i < kBlockN; i += kThreads) {
      int const key = first_key + i;
      bool const is_key = key < mask.seqlen_k;
      shared.queries_of_key[i][0] = is_key ? mask.q_lo(key) : 0;
      shared.queries_of_key[i][1] = is_key ? mask.q_hi(key) : 0;
    }
    if (thread < Config::kWarpsN) {
      int const first = first_key + thread * Config::kWarpKeys;
      int last = first + Config::kWarpKeys - 1;
      bool const is_whole = last < mask.seqlen_k;
      if (!is_whole) last = mask.seqlen_k - 1;
      typename Config::Visible visible = {0, 0, 0, 0};
      if (first <= last) visible = {mask.q_lo(first), mask.q_hi(last), mask.q_lo(last), 0};
      if (is_whole) visible.all_end = mask.q_hi(first);
      shared.block.visible[thread] = visible;
    }
  }

  using BlockInfo = typename Config::BlockInfo;

  // dK and dV, rounded.
  template <class Arch, class Step>
  CUTE_DEVICE static void store(Params const& params, BlockInfo const& block, Step const& step) {
    Problem const& p = params.problem;
    float const v_scale = Config::kMayDrop ? block.dropout.kept_scale : 1.0f;
    float const scale = p.logits.softmax_scale * v_scale;
    if constexpr (Config::kHasRoles) {
      if (step.role() == 0) {
        store_rows<Arch>(params.grad.v, p.head_dim_v, v_scale, block, p, step.grad[0]);
      } else {
        store_rows<Arch>(params.grad.k, p.head_dim, scale, block, p, step.grad[0]);
      }
    } else {
      store_rows<Arch>(params.grad.v, p.head_dim_v, v_scale, block, p, step.grad[0]);
      store_rows<Arch>(params.grad.k, p.head_dim, scale, block, p, step.grad[1]);
    }
  }

  template <class Arch, class Grad>
  CUTE_DEVICE static void store_rows(Operand const& to, int columns, float scale,
                                     BlockInfo const& block, Problem const& p, Grad const& grad) {
    if (to.data == nullptr) return;
    int const thread = opaque(Arch::thread()), lane = thread % 32;
    int const first_row = thread / 32 % Config::kWarpsN * Config::kWarpKeys + lane / 4;
    int const keys = block.seq.lens(p).k - block.tile.begin;
    Element* target = block.seq.template keys<Element>(to, block.tile.head) +
                      int64_t(block.tile.begin + first_row) * to.row_stride;
    CUTE_UNROLL
    for (int m = 0; m < Config::kKeyBlocks; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int first = 0; first < Config::kHeadDim / 8; first += 4) {
          uint32_t words[4];
          CUTE_UNROLL
          for (int n = 0; n < 4; ++n) {
            words[n] = Arch::template pack<Element>(grad(2 * half, m, first + n) * scale,
                                                    grad(2 * half + 1, m, first + n) * scale);
          }
          store_columns<Arch>(target, words, first, columns, first_row + m * 16 + half * 8 < keys,
                              lane);
        }
        target += 8 * to.row_stride;
      }
    }
  }
};

}  // namespace cutlass_attn::sm80
