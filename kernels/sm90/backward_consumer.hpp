// A consumer warpgroup with 64 keys: computes their dK and dV.
//
// S and dP have keys in rows, so that P and dS, rounded, are the A operand of the next products, in
// registers. dS also goes to shared memory, for dQ (backward_grad_q.hpp):
//
//   tensor cores   S(i)        dP(i) dV(i)       dK(i)   S(i+1)
//   the rest              P(i)            dS(i)
//
// No wgmma of this warpgroup is in flight between steps. Meanwhile the tensor cores run products of
// the other warpgroups. Two warpgroups take turns: one computes S and P of a step, the other the
// rest of a step, so that exponentials of one overlap products of the other. Where they do not,
// warpgroups share no barrier, but begin one after the other (docs/notes/backward.md).
//
// With a softcap, a score_mod or dropout, dS and dV need different P. P for dS waits in shared
// memory, because registers do not suffice for both.
#pragma once

#include "sm90/backward_config.hpp"
#include "sm90/backward_tile_bias.hpp"
#include "tile/backward_captures.hpp"
#include "tile/backward_scores.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct BackwardConsumer {
  using Element = typename Config::Element;
  using Shared = typename Config::SharedStorage;
  using Address = typename Arch::SmemAddress;
  using TileKv = typename Config::TileKv;
  using TileQ = typename Config::TileQ;
  using TileS = typename Config::TileS;
  using Products = BackwardProducts<Config, Arch>;
  using Scores = BackwardScores<Config, Score, Arch>;
  static constexpr int kM = Config::kBlockM;
  static constexpr int kFirstThread = Config::kFirstKeysGroup * Config::kGroupThreads;
  // Whether P for dV differs from P for dS.
  static constexpr bool kHasTwoWeights = !Score::kIsLinear || Config::kDrops;
  // Whether two warpgroups take turns. Where S and P take most of a step, turns cost time.
  static constexpr bool kTakesTurns = Config::kGroups == 2 && !kHasTwoWeights && !Config::kHasMask;
  static constexpr int kFirstTurn = 4;    // named barrier of the first warpgroup's turn
  static constexpr int kStaggerNs = 300;  // between the starts of warpgroups

  using Params = typename Config::Params;
  using Steps = StepsOf<Config>;

  Params const& params;
  Problem const& p;
  Shared& shared;
  int const group;  // this warpgroup
  int const stage;  // of K and the KeyTile
  Scores const scores;
  Ring<Config::kStages> ring;

  typename Products::Grad grad_k, grad_v;
  typename Products::Slice x;           // S, then dP
  typename Products::Packed weights;    // P for dV
  typename Scores::SavedWeights saved;  // P for dS, while it is not in shared memory
  typename Scores::Kept products;       // S, for gradients of tensors that a score_mod captures
  typename Products::Packed grad_s;

  // ring: of the first step.
  CUTE_DEVICE BackwardConsumer(Params const& params, Shared& shared, int group, int stage,
                               Ring<Config::kStages> const& ring)
      : params(params),
        p(params.problem),
        shared(shared),
        group(group),
        stage(stage),
        scores{p, score_in_log2<Score>(p, lens()),
               opaque(score_in_log2<Score>(p, lens()).log2_scale()), key_tile().dropout},
        ring(ring) {
    clear(grad_k);
    clear(grad_v);
  }

  // Index of this thread among the consumer threads. Recomputed at each use, because keeping it
  // would cost a register.
  CUTE_DEVICE static int thread() { return opaque(Arch::thread()) - kFirstThread; }

  // opaque: with addresses in both tiles in registers, D = 64 in fp16 spills in its loop.
  CUTE_DEVICE auto const& key_tile() const {
    return shared.tiles[Config::kIsPersistent ? opaque(stage) : 0];
  }

  // Goes through the steps of the tile. K is full.
  CUTE_DEVICE void run(int steps) {
    if (steps == 0) {
      // Otherwise v_empty could complete two phases before the producer has waited for the first.
      if constexpr (Config::kIsPersistent) Arch::mbarrier_wait(&shared.v_full, stage);
      return;
    }
    Steps at(params, key_tile());
    if constexpr (!Config::kIsPersistent) Arch::mbarrier_wait(&shared.v_full, 0);
    CUTE_NO_UNROLL
    do {
      step(at, at.number + 1 == steps);
      at.advance(key_tile().range);
    } while (at.number < steps);
  }

  // Called by each warpgroup before a tile with steps: the last one lets the first one begin.
  // Without turns, warpgroups begin their first tile one after the other.
  CUTE_DEVICE static void begin(int group, bool is_first_tile) {
    if constexpr (kTakesTurns) {
      if (group == Config::kGroups - 1) pass_turn(group);
    } else {
      for (int i = 0; is_first_tile && i < group; ++i) Arch::sleep(kStaggerNs);
    }
  }

 private:
  CUTE_DEVICE void step(Steps const& at, bool is_last) {
    Arch::mbarrier_wait(&shared.q_full[ring.stage], ring.round);
    uint32_t const bits = load_bits(at);
    if constexpr (kTakesTurns) {
      Arch::sync(kFirstTurn + group, Config::kComputeThreads);  // this warpgroup's turn
    }
    issue_first(shared.k[stage], shared.q);  // S
    Arch::template wgmma_wait<0>(registers_of(x));
    Scores::keep(x, products);
    to_weights(at, bits);
    // Nobody waits for the turn after the last warpgroup's last step.
    if (kTakesTurns && !(is_last && group == Config::kGroups - 1)) pass_turn(group);

    Arch::mbarrier_wait(&shared.grad_o_full[ring.stage], ring.round);
    // Here, because the V of the tile before is read until its last step.
    if (Config::kIsPersistent && at.number == 0) Arch::mbarrier_wait(&shared.v_full, stage);
    issue_first(shared.v, shared.grad_o);  // dP
    issue_second(products_of_v(), shared.grad_o, grad_v);
    if constexpr (kHasTwoWeights) {  // frees the registers of `weights`
      Arch::template wgmma_wait<0>(registers_of(x), registers_of(grad_v), weights);
    } else {
      Arch::template wgmma_wait<1>(registers_of(x));
    }
    Arch::mbarrier_wait(&shared.grad_s_empty[ring.stage], ring.round ^ 1);
    if constexpr (Config::kHasBias) {
      Arch::sync(1 + group, Config::kGroupThreads);  // bias empty: dS reuses its buffer
    }
    if constexpr (Scores::kHasCaptures) captured(at).add_before(x, weights, products, stats());
    to_grad_s();
    issue_second(grad_s, shared.q, grad_k);
    publish_grad_s();  // after the product is issued: the fence waits for the stores
    if constexpr (Scores::kHasCaptures) captured(at).add_after(x, saved);
    Arch::template wgmma_wait<0>(registers_of(grad_v), registers_of(grad_k), products_of_v(),
                                 grad_s);
    arrive<Arch>(&shared.empty[ring.stage]);
    ring.advance();
  }

  CUTE_DEVICE static void pass_turn(int group) {
    Arch::arrive(kFirstTurn + (group + 1) % Config::kGroups, Config::kComputeThreads);
  }

  // Mask bits of this thread's S, loaded while S is computed.
  CUTE_DEVICE uint32_t load_bits(Steps const& at) const {
    if constexpr (Config::kHasMask) {
      int const tile = at.present().bits;
      if (tile >= 0) {
        return params.map
            .bits[int64_t(tile) * Config::kComputeThreads + BackwardConsumer::thread()];
      }
    }
    return ~0u;
  }

  // Hooks of BackwardScores.
  struct Extra {
    Shared& shared;
    uint32_t const bits;
    int const thread, stage;

    CUTE_DEVICE void apply_bits(typename Products::Slice& x) const {
      static_assert(!Config::kHasMask || Products::Slice::kSize == 32);
      unpredicated_if(Arch::any(bits != ~0u), [&] {
        CUTE_UNROLL
        for (int i = 0; i < 32; ++i) x.x[i] = bits >> i & 1 ? x.x[i] : -kInf;
      });
    }
    CUTE_DEVICE void add_bias(Score const& score, typename Products::Slice& x) const {
      using TileBias = typename Config::TileBias;
      char const* const tile =
          shared.grad_s[stage] + thread / Config::kGroupThreads * TileBias::kBytes;
      add_tile_bias<TileBias, Arch, Element>(tile, thread, score, x);
    }
    CUTE_DEVICE void keep(int n, typename Scores::SavedWeights const& saved) const {
      if constexpr (kHasTwoWeights) {
        Arch::store_shared(Arch::smem_address(shared.weights[n][thread]), saved.products[n][0]);
      }
    }
  };

  CUTE_DEVICE StepPlace place(Steps const& at) const {
    auto const& step = at.present();
    int const first_key = BackwardConsumer::thread() / 32 * Config::kWarpKeys;
    RowTile const& keys = key_tile().tile;
    return {keys.batch, step.head, keys.begin + first_key, step.tile * kM};
  }
  CUTE_DEVICE SeqLens lens() const { return key_tile().seq.lens(p); }

  // P as the A operand of dV.
  CUTE_DEVICE typename Products::Packed& products_of_v() {
    if constexpr (kHasTwoWeights) {
      return weights;
    } else {
      return saved.products;
    }
  }

  CUTE_DEVICE void to_weights(Steps const& at, uint32_t bits) {
    int const thread = BackwardConsumer::thread(), warp = thread / 32;
    Extra const extra{shared, bits, thread, ring.stage};
    if constexpr (Config::kHasMask) {
      scores.weights(x, place(at), lens(), 0, {}, stats(), {}, false, thread % 32, products_of_v(),
                     saved, extra);
    } else {
      VisibleQueries const visible = key_tile().visible[warp];
      int const first = at.tile * kM;
      bool const is_masked = first < visible.all_begin || first + kM > visible.all_end;
      Address const queries =
          Arch::smem_address(key_tile().queries_of_key[warp * Config::kWarpKeys]);
      scores.weights(x, place(at), lens(), 0, {}, stats(), queries, is_masked, thread % 32,
                     products_of_v(), saved, extra);
    }
  }

  // dS goes to registers and, for dQ, to shared memory as (key, query).
  CUTE_DEVICE void to_grad_s() {
    int const thread = BackwardConsumer::thread(), lane = thread % 32;
    if constexpr (kHasTwoWeights) {
      CUTE_UNROLL
      for (int n = 0; n < kM / 16; ++n) {
        Arch::load_shared(Arch::smem_address(shared.weights[n][thread]), saved.products[n][0]);
      }
    }
    scores.gradient(x, saved, stats(), lane, grad_s);
    // Matrix i of 16 queries: keys (i % 2) * 8 and following, queries (i / 2) * 8 and following.
    int const row = thread / 32 * Config::kWarpKeys + lane % 16;
    Address const to =
        Arch::smem_address(shared.grad_s[ring.stage]) + Address(TileS::offset(row, lane / 16 * 8));
    CUTE_UNROLL
    for (int n = 0; n < kM / 16; ++n) {
      Arch::stmatrix_x4((to ^ Address(n % 4 * 32)) + Address(n / 4 * TileS::kChunkBytes),
                        grad_s[n][0]);
    }
  }
  CUTE_DEVICE void publish_grad_s() const {
    Arch::fence_proxy_async();
    arrive<Arch>(&shared.grad_s_full[ring.stage]);
  }

  CUTE_DEVICE CapturedGrads<Scores> captured(Steps const& at) const {
    return {scores, place(at), 0, BackwardConsumer::thread() % 32};
  }

  CUTE_DEVICE Address stats() const { return Arch::smem_address(shared.stats[ring.stage]); }

  // --- Products ----------------------------------------------------------------------------------

  // x = (K or V) (Q or dO)^T, for this warpgroup's keys.
  CUTE_DEVICE void issue_first(char const (&keys)[TileKv::kBytes],
                               char const (&queries)[Config::kStages][TileQ::kBytes]) {
    auto const a = Arch::descriptor(keys + group * 64 * TileKv::kRowBytes, 16, 1024);
    auto const b = Arch::descriptor(queries[ring.stage], 16, 1024);
    auto& acc = registers_of(x);
    Arch::wgmma_fence(acc);
    CUTE_UNROLL
    for (int i = 0; i < Config::kSteps; ++i) {
      Arch::template wgmma_ss<Element>(acc, a + column_step<TileKv>(i), b + column_step<TileQ>(i),
                                       i != 0);
    }
    Arch::wgmma_commit();
  }

  // acc += (P or dS) (dO or Q)
  CUTE_DEVICE void issue_second(typename Products::Packed& words,
                                char const (&queries)[Config::kStages][TileQ::kBytes],
                                typename Products::Grad& grad) {
    auto const b = Arch::descriptor(queries[ring.stage], TileQ::kChunkBytes, 1024);
    auto& acc = registers_of(grad);
    Arch::wgmma_fence(acc, words);
    CUTE_UNROLL
    for (int i = 0; i < kM / 16; ++i) {
      Arch::template wgmma_rs<Element>(acc, words[i][0], b + i * 16 * TileQ::kRowBytes / 16, true);
    }
    Arch::wgmma_commit();
  }
};

}  // namespace cutlass_attn::sm90
