// Backward on mma.sync. A block computes dK and dV of a tile of keys, and adds its part of dQ to
// global memory. P is recomputed.
//
//   grid    one block per (batch, KV head, tile of kBlockN keys)
//   block   warps along the keys; beyond head dim 64 two warps share keys, in two roles
//           (beyond 256 four warps, of which two divide the columns of a role)
//   loop    tiles of kBlockM queries, of all query heads that read the KV head, so that dK and dV
//           of grouped heads accumulate in registers
//
//   a step, for a slice of queries at a time:
//
//     first role   S = K Q^T --> P = exp(S - LSE) --> dV += P dO
//                                     | (smem)
//     second role  dP = V dO^T --> dS = P (dP - delta) --> dK += dS Q
//                                     | (smem)
//     all warps    dQ = dS K of the previous step, added to memory
//
// With dropout, P is multiplied by 1 where a weight is kept, not by the factor of kept weights.
// delta is divided by that factor in advance; dQ, dK and dV are multiplied by it when they are
// rounded.
//
// Address arithmetic is the part of a step that can be saved. Addresses that depend on batch and
// head are computed once per block (Config::Rows), the warps of a role copy one operand each, and a
// lane's offset is known to be non-negative (opaque_index). Together with 32 queries per step
// instead of 16, that takes 44 % fewer instructions per product at d256, and 21 % fewer at d128
// (docs/notes/ada.md).
//
// Registers:      dK or dV (both without roles), and as much of K or V as BackwardConfig says
// Shared memory:  K; Q and dO of this step and of the next one (only dO of this step where two do
//                 not fit); dS of this step and of the previous one
// Barriers:       one per step
//
// tile/backward_rows.hpp has the launches before and after.
#pragma once

#include "core/opaque.hpp"
#include "sm80/backward_bias.hpp"
#include "sm80/backward_config.hpp"
#include "sm80/backward_step.hpp"
#include "tile/backward_block.hpp"
#include "tile/backward_params.hpp"
#include "tile/backward_rows.hpp"
#include "tile/tile_copy.hpp"

namespace cutlass_attn::sm80 {

template <class Element, class Shape, class... Options>
struct Backward : KernelDefaults {
  using Traits = cutlass_attn::Traits<Element, Shape, Options...>;
  static_assert(Traits::template are_among<with::PackedRows, with::GeneralScore, with::FixedOrder,
                                           with::Dropout, with::BiasGrad>);
  using Config = BackwardConfig<Traits>;
  using SeqInfo = typename Config::SeqInfo;
  using Shared = typename Config::SharedStorage;
  using Params = MmaBackwardParams;
  using Before = std::conditional_t<Config::kHasBiasGrad, BackwardBeforeBias<Element, SeqInfo>,
                                    BackwardBefore<Element, SeqInfo>>;
  using After = BackwardAfter<Element, SeqInfo>;
  static constexpr bool kIsVarlen = Config::kIsVarlen;
  static constexpr int kThreads = Config::kThreads, kMinBlocksPerSm = Config::kMinBlocksPerSm;
  static constexpr int kSmemBytes = sizeof(Shared);
  static constexpr int kBlockN = Config::kBlockN,
                       kBlockM = kBlockN;  // rows of a block's tile: keys

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    RowTile const tile = params.keys.tile<kBlockN, kIsVarlen, Arch>(
        p.seq_k, p.batch, number_of_tile<Config, Arch>(params, Arch::block(), shared.block.ticket));
    SeqInfo const seq(p, tile.batch);
    SeqLens const lens = seq.lens(p);
    if (tile.begin >= lens.k) return;
    int const end = tile.begin + kBlockN < lens.k ? tile.begin + kBlockN : lens.k;
    TileRange const range = params.template mask<Config::kIsGeneral>(lens).query_tiles(
        tile.begin, end, Config::kBlockM);

    if (Arch::thread() == 0) {
      shared.block.seq = seq;
      shared.block.tile = tile;
      shared.block.range = range;
      if constexpr (Config::kMayDrop) shared.block.dropout = DropoutMask(p);
      int const head = tile.head * params.heads_per_kv;
      int64_t const number =
          params.queries.number<Params::kTileRows, kIsVarlen>(p.seq_q, {tile.batch, head, 0});
      shared.from = {seq.template queries<Element const>(p.q, head),
                     seq.template queries<Element const>(params.grad.o, head),
                     params.stats + number * Params::kTileRows * 2,
                     params.grad_q ? params.grad_q_at(number, 0) : nullptr};
    }
    share_visible<Config, Arch>(params.template mask<Config::kIsGeneral>(lens), tile.begin,
                                kThreads, shared.block.visible, shared.queries_of_key);
    Arch::sync();  // shared.block full

    BackwardStep<Config, Score, Arch> step(params, lens, shared);
    step.load_keys();
    step.run();
    store<Arch>(params, shared.block, step);
  }

 private:
  using BlockInfo = typename Config::BlockInfo;

  // Rounds and stores dK and dV.
  template <class Arch, class Step>
  CUTE_DEVICE static void store(Params const& params, BlockInfo const& block, Step const& step) {
    Problem const& p = params.problem;
    float const v_scale = Config::kMayDrop ? block.dropout.kept_scale : 1.0f;
    float const scale = p.logits.softmax_scale * v_scale;
    int const thread = opaque_index(Arch::thread());
    auto const store_rows = [&](Operand const& to, int columns, float factor, auto const& grad) {
      store_grad<Config, Arch>(to, columns, factor, block, p, grad, thread,
                               Step::column_group(thread / 32) * (Config::kColumns / 8));
    };
    if constexpr (Config::kHasRoles) {
      // Not step.role(): it would stay in local memory until here (8 bytes with packed sequences).
      if (Arch::thread() < Config::kThreads / 2) {
        store_rows(params.grad.v, p.head_dim_v, v_scale, step.grad[0]);
      } else {
        store_rows(params.grad.k, p.head_dim, scale, step.grad[0]);
      }
    } else {
      store_rows(params.grad.v, p.head_dim_v, v_scale, step.grad[0]);
      store_rows(params.grad.k, p.head_dim, scale, step.grad[1]);
    }
  }
};

}  // namespace cutlass_attn::sm80
