// A block with a tile of 64 keys: computes their dK and dV over all queries that see them.
//
// Both warpgroups have all 64 keys, in rows. The first warpgroup computes S, P and dV, the second
// dP, dS and dK. P, rounded, goes from the first to the second through shared memory, in register
// order. P and dS are the A operand of the next products, in registers.
//
//   first     S(i)  P(i)   dV(i) S(i+1)  P(i+1)   dV(i+1) ...
//   second          dP(i)        dS(i)   dK(i) dP(i+1)  dS(i+1) ...
//
// Each warpgroup issues the second product of a step together with the first product of the next
// step. dS waits for the other warpgroup's P, so the two warpgroups use the tensor cores in turn.
#pragma once

#include "core/math.hpp"
#include "core/score.hpp"
#include "sm90/backward_config.hpp"
#include "sm90/backward_two_pass_config.hpp"

namespace cutlass_attn::sm90 {

// The two producer warps. One copies K once, and Q with -LSE in each step; the other copies V once,
// and dO with delta in each step. Because they are two warps, neither waits for a buffer of the
// other.
template <class Config, class Arch>
struct KeysProducer {
  using Shared = typename Config::KeysStorage;
  using TileQk = typename Config::TileQk;
  using TileV = typename Config::TileV;
  using Params = typename Config::Params;

  Params const& params;
  Shared& shared;
  int const steps;

  CUTE_DEVICE void copy_q() const {
    copy<TileQk>(0, params.k, shared.k, &shared.k_full, params.q, shared.q, shared.neg_lse,
                 shared.q_full, shared.q_empty);
  }
  CUTE_DEVICE void copy_grad_o() const {
    copy<TileV>(1, params.v, shared.v, &shared.v_full, params.grad_o, shared.grad_o, shared.delta,
                shared.grad_o_full, shared.grad_o_empty);
  }

 private:
  static constexpr int kStages = Config::kQueryStages, kM = Config::kBlockM;
  static_assert(kM == 64, "a lane has the statistics of two queries");

  // stat: 0 for -LSE, 1 for delta
  template <class Tile, class Rows>
  CUTE_DEVICE void copy(int stat, Rows const& stationary, char* once, arch::Barrier* once_full,
                        Rows const& rows, char (&tiles)[kStages][Tile::kBytes],
                        float (&stats)[kStages][kM], arch::Barrier (&full)[kStages],
                        arch::Barrier (&empty)[kStages]) const {
    if (steps == 0) return;
    RowTile const& tile = shared.block.tile;
    if (Arch::elect()) {
      Arch::mbarrier_arrive_expect_tx(once_full, Tile::kBytes);
      load_tile<Tile, Arch>(stationary, once, once_full, tile.begin, tile.head,
                            key_rows(shared.block.seq, params.problem));
    }
    BackwardSteps<Config> at(params, shared.block);
    Ring<kStages> ring;
    int const lane = Arch::thread() % 32;
    CUTE_NO_UNROLL
    while (at.number < steps) {
      float const* const from =
          params.stats + at.number_of(params, tile.batch) * (kM * 2) + lane * 4 + stat;
      float const of_even = from[0], of_odd = from[2];
      Arch::mbarrier_wait(&empty[ring.stage], ring.round ^ 1);
      stats[ring.stage][lane * 2] = of_even;
      stats[ring.stage][lane * 2 + 1] = of_odd;
      Arch::sync_warp();
      if (Arch::elect()) {
        Arch::mbarrier_arrive_expect_tx(&full[ring.stage], Tile::kBytes);
        load_tile<Tile, Arch>(rows, tiles[ring.stage], &full[ring.stage], at.tile * kM, at.head,
                              query_rows(shared.block.seq, params.problem));
      }
      at.advance(shared.block.range);
      ring.advance();
    }
  }
};

template <class Config, class Score, class Arch>
struct KeysConsumer {
  using Element = typename Config::Element;
  using Shared = typename Config::KeysStorage;
  using Address = typename Arch::SmemAddress;
  using TileQk = typename Config::TileQk;
  using TileV = typename Config::TileV;
  using Products = TwoPassProducts<Config, Arch>;
  using Params = typename Config::Params;
  static constexpr int kM = Config::kBlockM;

  Params const& params;
  Shared& shared;
  int const steps;
  Ring<Config::kQueryStages> ring = {};
  Ring<Config::kPStages> p_ring = {};
  typename Config::Weights x = {};       // S and P, or dP and dS
  typename Config::Packed weights = {};  // P or dS, rounded

  // The first warpgroup: dV.
  CUTE_DEVICE void run(typename Config::GradV& grad_v) {
    clear(grad_v);
    if (steps == 0) return;
    BackwardSteps<Config> at(params, shared.block);
    Arch::mbarrier_wait(&shared.k_full, 0);
    issue_s();
    Arch::template wgmma_wait<0>(x.x);
    recompute_p(at.tile);
    CUTE_NO_UNROLL
    for (at.advance(shared.block.range); at.number < steps; at.advance(shared.block.range)) {
      int const stage = ring.stage;
      issue_grad_v(grad_v);
      ring.advance();
      issue_s();
      Arch::template wgmma_wait<1>(grad_v.x, weights);
      arrive<Arch>(&shared.grad_o_empty[stage]);
      Arch::template wgmma_wait<0>(x.x);
      recompute_p(at.tile);
    }
    issue_grad_v(grad_v);
    Arch::template wgmma_wait<0>(grad_v.x, weights);
  }

  // The second warpgroup: dK.
  CUTE_DEVICE void run(typename Config::GradQk& grad_k, std::true_type) {
    clear(grad_k);
    if (steps == 0) return;
    Arch::mbarrier_wait(&shared.v_full, 0);
    issue_dp();
    Arch::template wgmma_wait<0>(x.x);
    differentiate();
    CUTE_NO_UNROLL
    for (int i = 1; i < steps; ++i) {
      int const stage = ring.stage;
      issue_grad_k(grad_k);
      ring.advance();
      issue_dp();
      Arch::template wgmma_wait<1>(grad_k.x, weights);
      arrive<Arch>(&shared.q_empty[stage]);
      Arch::template wgmma_wait<0>(x.x);
      differentiate();
    }
    issue_grad_k(grad_k);
    Arch::template wgmma_wait<0>(grad_k.x, weights);
  }

 private:
  CUTE_DEVICE void issue_s() {
    Arch::mbarrier_wait(&shared.q_full[ring.stage], ring.round);
    Products::template issue_first<TileQk>(shared.k, shared.q[ring.stage], x);
  }
  CUTE_DEVICE void issue_dp() {
    Arch::mbarrier_wait(&shared.grad_o_full[ring.stage], ring.round);
    Products::template issue_first<TileV>(shared.v, shared.grad_o[ring.stage], x);
  }
  CUTE_DEVICE void issue_grad_v(typename Config::GradV& grad_v) {
    Arch::mbarrier_wait(&shared.grad_o_full[ring.stage], ring.round);
    Products::template issue_second<TileV>(weights, shared.grad_o[ring.stage], grad_v);
  }
  CUTE_DEVICE void issue_grad_k(typename Config::GradQk& grad_k) {
    Products::template issue_second<TileQk>(weights, shared.q[ring.stage], grad_k);
  }

  // S to P, for both warpgroups.
  CUTE_DEVICE void recompute_p(int tile) {
    to_weights(tile * kM);
    arrive<Arch>(&shared.q_empty[ring.stage]);
    Products::pack(x, weights);
    hand_over();
  }
  // dP to dS.
  CUTE_DEVICE void differentiate() {
    take_over();
    to_grad_s();
    arrive<Arch>(&shared.grad_o_empty[ring.stage]);
    Arch::mbarrier_wait(&shared.q_full[ring.stage], ring.round);
    Products::pack(x, weights);
  }

  // --- P and dS: keys in rows, queries in columns ------------------------------------------------

  // Calls visit(x, stat, n, i) for each element x(i, 0, n), with its query's entry of `stats`.
  template <class Visit>
  CUTE_DEVICE void for_queries(float const (&stats)[kM], Visit&& visit) {
    Address const from = Arch::smem_address(stats) + Address(thread_of_group<Arch>() % 4 * 8);
    CUTE_UNROLL
    for (int n = 0; n < kM / 8; ++n) {
      float stat[2];
      Arch::load_shared(from + Address(n * 32), stat);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) visit(x(i, 0, n), stat[i % 2], n, i);
    }
  }

  CUTE_DEVICE void to_weights(int first_query) {
    int const thread = thread_of_group<Arch>();
    VisibleQueries const visible = shared.block.visible[thread / 32];
    bool const is_masked = first_query < visible.all_begin || first_query + kM > visible.all_end;
    unpredicated_if(is_masked, [&] { apply_mask(first_query); });
    float const log2_scale = Score(params.problem).log2_scale();
    for_queries(shared.neg_lse[ring.stage], [&](float& s, float neg_lse, int, int) {
      s = fast_exp2(fmaf(s, log2_scale, neg_lse));
    });
  }

  // -inf for queries that do not see the key.
  CUTE_DEVICE void apply_mask(int first_query) {
    int const thread = opaque(thread_of_group<Arch>());
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const key = thread / 32 * 16 + half * 8 + thread % 32 / 4;
      int32_t seen_by[2];
      Arch::load_shared(Arch::smem_address(shared.queries_of_key[key]), seen_by);
      int const place = first_query + thread % 4 * 2;
      int const begin = seen_by[0] - place, end = seen_by[1] - place;
      CUTE_UNROLL
      for (int n = 0; n < kM / 8; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& s = x(2 * half + i, 0, n);
          s = n * 8 + i >= begin && n * 8 + i < end ? s : -kInf;
        }
      }
    }
  }

  CUTE_DEVICE void to_grad_s() {
    for_queries(shared.delta[ring.stage], [&](float& dp, float delta, int n, int i) {
      uint32_t const word = weights[n / 2][n % 2 * 2 + i / 2];
      float const weight = element_to_float<Element>(uint16_t(i % 2 ? word >> 16 : word));
      dp = weight * (dp - delta);
    });
  }

  // --- P from the first warpgroup to the second --------------------------------------------------

  CUTE_DEVICE Address place_of_p() const {
    return Arch::smem_address(shared.p[p_ring.stage]) + Address(thread_of_group<Arch>() * 16);
  }
  CUTE_DEVICE void hand_over() {
    Arch::mbarrier_wait(&shared.p_empty[p_ring.stage], p_ring.round ^ 1);
    CUTE_UNROLL
    for (int n = 0; n < 4; ++n) Arch::store_shared(place_of_p() + Address(n * 2048), weights[n]);
    arrive<Arch>(&shared.p_full[p_ring.stage]);
    p_ring.advance();
  }
  CUTE_DEVICE void take_over() {
    Arch::mbarrier_wait(&shared.p_full[p_ring.stage], p_ring.round);
    CUTE_UNROLL
    for (int n = 0; n < 4; ++n) Arch::load_shared(place_of_p() + Address(n * 2048), weights[n]);
    arrive<Arch>(&shared.p_empty[p_ring.stage]);
    p_ring.advance();
  }
};

}  // namespace cutlass_attn::sm90
