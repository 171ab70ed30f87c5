// A warpgroup that computes: dK and dV of 64 keys, and its columns of every step's dQ.
//
// S and dP have keys in rows, so that P and dS, rounded, are A of the products that follow, in
// registers. dQ adds up over all keys of the block: dS goes through shared memory, and dQ of a step
// is multiplied in the next one, beside its softmax:
//
//   tensor cores   S(i) dQ(i-1)                      dP(i) dV(i)       dK(i)   S(i+1) dQ(i) ...
//   the rest               P(i)  dQ(i-1) to memory           dS(i)
//
// Nothing is in flight from one step to the next: with dK(i) there, or dQ(i-1) beside dP(i), ptxas
// has too few registers at head dim 128 and serializes all products. The only barrier of a step is
// that of dS, which has two buffers.
#pragma once

#include "core/opaque.hpp"
#include "sm80/backward_scores.hpp"
#include "sm90/backward_config.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct BackwardConsumer {
  using Element = typename Config::Element;
  using Shared = typename Config::SharedStorage;
  using Address = typename Arch::SmemAddress;
  using TileKv = typename Config::TileKv;
  using TileQ = typename Config::TileQ;
  using TileS = typename Config::TileS;
  using Products = sm80::BackwardProducts<Config, Arch>;
  using Scores = sm80::BackwardScores<Config, Score, Arch>;
  using Position = BackwardPosition;
  static constexpr int kM = Config::kBlockM, kDsBarrier = 1;
  static_assert(Score::kIsIdentity);

  BackwardParams const& params;
  Problem const& p;
  Shared& shared;
  int const group;  // this warpgroup
  Scores const scores;
  Ring<Config::kStages> ring = {};

  typename Products::Grad grad_k, grad_v;
  typename Products::Slice x;      // S, then dP
  typename Scores::Given weights;  // P: with an identity score what dS wants of it is P itself
  typename Products::Packed grad_s;
  using GradQ = decltype(make_tensor<float>(Shape<_4, _1, Int<Config::kColumnsOfQ / 8>>{}));
  GradQ grad_q;

  CUTE_DEVICE BackwardConsumer(BackwardParams const& params, SeqLens const& lens, Shared& shared,
                               int group)
      : params(params),
        p(params.problem),
        shared(shared),
        group(group),
        scores{p, score_in_log2<Score>(p, lens), score_in_log2<Score>(p, lens).log2_scale(),
               shared.block.dropout} {
    clear(grad_k);
    clear(grad_v);
  }

  // Of those that compute. Asked for where it is needed: kept, it would take a register.
  CUTE_DEVICE static int thread() { return opaque(Arch::thread()) - Config::kGroupThreads; }

  CUTE_DEVICE void run(int steps) {
    if (steps == 0) return;
    TileRange const& range = shared.block.range;
    Position now = {shared.block.tile.head * params.heads_per_kv, range.begin, 0};
    Arch::barrier_wait(&shared.k_full, 0);
    step<true>(now, now);
    CUTE_NO_UNROLL
    while (now.number + 1 < steps) {
      Position const before = now;
      now = now.next(range);
      step<false>(now, before);
    }
    issue_grad_q(now);
    Arch::template wgmma_wait<0>(of(grad_q));
    add_grad_q(now);
  }

 private:
  template <bool kIsFirst>
  CUTE_DEVICE void step(Position const& at, Position const& before) {
    Arch::barrier_wait(&shared.q_full[ring.stage], ring.round);
    issue_first(shared.k, shared.q);  // S
    if constexpr (kIsFirst) {
      Arch::template wgmma_wait<0>(of(x));
      Arch::barrier_wait(&shared.v_full, 0);
      to_weights(at);
    } else {
      issue_grad_q(before);
      Arch::template wgmma_wait<1>(of(x));
      to_weights(at);
      Arch::template wgmma_wait<0>(of(grad_q));
      add_grad_q(before);
    }

    Arch::barrier_wait(&shared.grad_o_full[ring.stage], ring.round);
    issue_first(shared.v, shared.grad_o);  // dP
    issue_second(weights.products, shared.grad_o, grad_v);
    Arch::template wgmma_wait<1>(of(x));
    to_grad_s(at);
    issue_second(grad_s, shared.q, grad_k);
    Arch::template wgmma_wait<0>(of(grad_v), of(grad_k), weights.products, grad_s);
    release();
    ring.advance();
  }

  CUTE_DEVICE void to_weights(Position const& at) {
    int const thread = BackwardConsumer::thread(), warp = thread / 32;
    sm80::VisibleQueries const visible = shared.block.visible[warp];
    int const first = at.tile * kM, first_key = warp * Config::kWarpKeys;
    bool const is_masked = first < visible.all_begin || first + kM > visible.all_end;
    sm80::StepPlace const place{shared.block.tile.batch, at.head,
                                shared.block.tile.begin + first_key, first};
    Address const queries = Arch::smem_address(shared.queries_of_key[first_key]);
    scores.weights(x, place, 0, stats(), queries, is_masked, thread % 32, weights.products,
                   weights);
  }

  // In registers and, for dQ, in shared memory.
  CUTE_DEVICE void to_grad_s(Position const& at) {
    int const thread = BackwardConsumer::thread(), lane = thread % 32;
    scores.gradient(x, weights, stats(), lane, grad_s);
    int const row = thread / 32 * Config::kWarpKeys + lane / 4;
    Products::store_s(grad_s, 0,
                      Arch::smem_address(shared.grad_s[at.number % 2]) +
                          Address(TileS::offset(row, 0) + lane % 4 * 4));
    Arch::async_proxy_fence();
  }

  CUTE_DEVICE Address stats() const { return Arch::smem_address(shared.stats[ring.stage]); }

  // --- Products ----------------------------------------------------------------------------------

  // x = (K or V) (Q or dO)^T, of this warpgroup's keys.
  CUTE_DEVICE void issue_first(char const (&keys)[TileKv::kBytes],
                               char const (&queries)[Config::kStages][TileQ::kBytes]) {
    auto const a = Arch::descriptor(keys + group * 64 * TileKv::kRowBytes, 16, 1024);
    auto const b = Arch::descriptor(queries[ring.stage], 16, 1024);
    auto& acc = of(x);
    Arch::wgmma_fence(acc);
    CUTE_UNROLL
    for (int i = 0; i < Config::kSteps; ++i) {
      Arch::template wgmma_ss<Element>(acc, a + step_of<TileKv>(i), b + step_of<TileQ>(i), i != 0);
    }
    Arch::wgmma_commit();
  }
  template <class Tile>
  CUTE_DEVICE static constexpr int step_of(int i) {
    return (i / 4 * Tile::kChunkBytes + i % 4 * 32) / 16;
  }

  // acc += (P or dS) (dO or Q)
  CUTE_DEVICE void issue_second(typename Products::Packed& words,
                                char const (&queries)[Config::kStages][TileQ::kBytes],
                                typename Products::Grad& grad) {
    auto const b = Arch::descriptor(queries[ring.stage], TileQ::kChunkBytes, 1024);
    auto& acc = of(grad);
    Arch::wgmma_fence(acc, words);
    CUTE_UNROLL
    for (int i = 0; i < kM / 16; ++i) {
      Arch::template wgmma_rs<Element>(acc, words[i][0], b + i * 16 * TileQ::kRowBytes / 16, true);
    }
    Arch::wgmma_commit();
  }

  // This warpgroup's columns of dQ of a step.
  CUTE_DEVICE void issue_grad_q(Position const& at) {
    Arch::sync(kDsBarrier, Config::kComputeThreads);  // dS full
    int const column = group * Config::kColumnsOfQ;
    auto const a = Arch::descriptor(shared.grad_s[at.number % 2], TileS::kChunkBytes, 1024);
    auto const b = Arch::descriptor(shared.k + column / 64 * TileKv::kChunkBytes + column % 64 * 2,
                                    TileKv::kChunkBytes, 1024);
    auto& acc = of(grad_q);
    Arch::wgmma_fence(acc);
    CUTE_UNROLL
    for (int i = 0; i < Config::kBlockN / 16; ++i) {
      Arch::template wgmma_ts<Element>(acc, a + i * 16 * TileS::kRowBytes / 16,
                                       b + i * 16 * TileKv::kRowBytes / 16, i != 0);
    }
    Arch::wgmma_commit();
  }

  CUTE_DEVICE void add_grad_q(Position const& at) {
    if (params.grad_q == nullptr) return;
    int const thread = BackwardConsumer::thread(), warp = thread / 32 % 4;
    int64_t const tile = params.queries.template number<kM, false>(
        p.seq_q, {shared.block.tile.batch, at.head, at.tile * kM});
    int const first = group * Config::kColumnsOfQ / 16, end = params.columns / 16 - first;
    float* const to =
        params.grad_q_at(tile, warp * 16) + first * 256 + Arch::place_of(thread % 32, 0);
    CUTE_UNROLL
    for (int d = 0; d < Config::kColumnsOfQ / 16; ++d) {
      if (d >= end) break;
      Arch::add(to + d * 256, grad_q(_, 0, 2 * d));
      Arch::add(to + d * 256 + 128, grad_q(_, 0, 2 * d + 1));
    }
  }

  // Of the step's Q and dO, whose products are done, and its statistics, which lanes have read.
  CUTE_DEVICE void release() {
    Arch::sync_warp();
    if (thread() % 32 == 0) Arch::barrier_arrive(&shared.empty[ring.stage]);
  }

  // The registers of an accumulator.
  template <class Fragment>
  CUTE_DEVICE static auto& of(Fragment& fragment) {
    using Registers = float[decltype(size(fragment))::value];
    return reinterpret_cast<Registers&>(fragment(0));
  }
};

}  // namespace cutlass_attn::sm90
