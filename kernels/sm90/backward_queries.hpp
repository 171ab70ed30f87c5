// A block with a tile of 128 queries: computes their dQ over all keys that they see.
//
// Each warpgroup has 64 queries, in rows. dS, rounded, is the A operand of dQ, in registers.
//
//   tensor cores   S(j) dP(j)                  dQ(j) S(j+1) dP(j+1)
//   the rest             P(j)        dS(j)                  P(j+1) ...
#pragma once

#include "core/math.hpp"
#include "core/score.hpp"
#include "sm90/backward_config.hpp"
#include "sm90/backward_two_pass_config.hpp"

namespace cutlass_attn::sm90 {

// A producer warp. One copies Q once and K in each step; the other copies dO once and V in each
// step.
template <class Config, class Arch>
struct QueriesProducer {
  using Shared = typename Config::QueriesStorage;
  using TileQk = typename Config::TileQk;
  using TileV = typename Config::TileV;
  using Params = typename Config::Params;
  static constexpr int kGroups = Config::kGroups;

  Params const& params;
  Shared& shared;

  CUTE_DEVICE void copy_k() const {
    copy<TileQk>(params.q, shared.q, &shared.q_full, params.k, shared.k, shared.k_full,
                 shared.k_empty);
  }
  CUTE_DEVICE void copy_v() const {
    copy<TileV>(params.grad_o, shared.grad_o, &shared.grad_o_full, params.v, shared.v,
                shared.v_full, shared.v_empty);
  }

 private:
  template <class Tile, int kStages, class Rows>
  CUTE_DEVICE void copy(Rows const& stationary, char (&once)[kGroups][Tile::kBytes],
                        arch::Barrier* once_full, Rows const& rows,
                        char (&tiles)[kStages][Tile::kBytes], arch::Barrier (&full)[kStages],
                        arch::Barrier (&empty)[kStages]) const {
    TileRange const range = shared.range;
    if (range.begin >= range.end || !Arch::elect()) return;
    RowTile const& tile = shared.tile;
    SequenceRows const queries = query_rows(shared.seq, params.problem);
    SequenceRows const keys = key_rows(shared.seq, params.problem);
    Arch::mbarrier_arrive_expect_tx(once_full, kGroups * Tile::kBytes);
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      load_tile<Tile, Arch>(stationary, once[group], once_full, tile.begin + group * 64, tile.head,
                            queries);
    }
    int const head_kv = params.by_heads_per_kv(tile.head);
    Ring<kStages> ring;
    CUTE_NO_UNROLL
    for (int j = range.begin; j < range.end; ++j) {
      Arch::mbarrier_wait(&empty[ring.stage], ring.round ^ 1);
      Arch::mbarrier_arrive_expect_tx(&full[ring.stage], Tile::kBytes);
      load_tile<Tile, Arch>(rows, tiles[ring.stage], &full[ring.stage], j * 64, head_kv, keys);
      ring.advance();
    }
  }
};

template <class Config, class Score, class Arch>
struct QueriesConsumer {
  using Element = typename Config::Element;
  using Shared = typename Config::QueriesStorage;
  using Address = typename Arch::SmemAddress;
  using TileQk = typename Config::TileQk;
  using TileV = typename Config::TileV;
  using Products = TwoPassProducts<Config, Arch>;
  using Params = typename Config::Params;
  static constexpr int kN = 64;  // per step

  Params const& params;
  Shared& shared;
  int const group;  // this warpgroup
  Ring<Config::kKStages> k_ring = {};
  Ring<Config::kVStages> v_ring = {};
  float neg_lse[2] = {-kInf, -kInf}, delta[2] = {};  // of this thread's queries, rows g and g + 8
  typename Config::Weights s = {}, dp = {};
  typename Config::Packed grad_s = {};

  CUTE_DEVICE void run(typename Config::GradQk& grad_q) {
    clear(grad_q);
    TileRange const range = shared.range;
    if (range.begin >= range.end) return;
    read_stats();
    Arch::mbarrier_wait(&shared.q_full, 0);
    Arch::mbarrier_wait(&shared.grad_o_full, 0);
    issue_s();
    issue_dp();
    to_grad_s(range.begin);
    CUTE_NO_UNROLL
    for (int j = range.begin + 1; j < range.end; ++j) {
      int const stage = k_ring.stage;
      issue_grad_q(grad_q);
      k_ring.advance();
      issue_s();
      issue_dp();
      Arch::template wgmma_wait<2>(grad_q.x, grad_s);
      arrive<Arch>(&shared.k_empty[stage]);
      to_grad_s(j);
    }
    issue_grad_q(grad_q);
    Arch::template wgmma_wait<0>(grad_q.x, grad_s);
  }

 private:
  CUTE_DEVICE void issue_s() {
    Arch::mbarrier_wait(&shared.k_full[k_ring.stage], k_ring.round);
    Products::template issue_first<TileQk>(shared.q[group], shared.k[k_ring.stage], s);
  }
  CUTE_DEVICE void issue_dp() {
    Arch::mbarrier_wait(&shared.v_full[v_ring.stage], v_ring.round);
    Products::template issue_first<TileV>(shared.grad_o[group], shared.v[v_ring.stage], dp);
  }
  CUTE_DEVICE void issue_grad_q(typename Config::GradQk& grad_q) {
    Products::template issue_second<TileQk>(grad_s, shared.k[k_ring.stage], grad_q);
  }

  // dS of a tile of keys, while S and dP are in flight.
  CUTE_DEVICE void to_grad_s(int tile) {
    Arch::template wgmma_wait<1>(s.x);
    to_weights(tile * kN);
    Arch::template wgmma_wait<0>(dp.x);
    arrive<Arch>(&shared.v_empty[v_ring.stage]);
    v_ring.advance();
    CUTE_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) dp(i, 0, n) = s(i, 0, n) * (dp(i, 0, n) - delta[i / 2]);
    }
    Products::pack(dp, grad_s);
  }

  // Reads the statistics from the workspace. Queries beyond the sequence keep -inf, so their
  // weights are 0.
  CUTE_DEVICE void read_stats() {
    RowTile const& tile = shared.tile;
    int const first = tile.begin + group * 64, thread = thread_of_group<Arch>();
    int const row = thread / 32 * 16 + thread % 32 / 4;
    int const rows = shared.seq.lens(params.problem).q - first;
    if (rows <= 0) return;
    float const* const from =
        params.stats + params.queries.template number<64, Config::kIsVarlen>(
                           params.problem.seq_q, {tile.batch, tile.head, first}) *
                           128;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      neg_lse[half] = from[(row + half * 8) * 2];
      delta[half] = from[(row + half * 8) * 2 + 1];
    }
  }

  CUTE_DEVICE void to_weights(int first_key) {
    int const warp = group * 4 + thread_of_group<Arch>() / 32;
    int32_t const* const seen_by_all = shared.keys_of_all[warp];
    bool const is_masked = first_key < seen_by_all[0] || first_key + kN > seen_by_all[1];
    unpredicated_if(is_masked, [&] { apply_mask(first_key); });
    float const log2_scale = Score(params.problem).log2_scale();
    CUTE_UNROLL
    for (int n = 0; n < kN / 8; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        s(i, 0, n) = fast_exp2(fmaf(s(i, 0, n), log2_scale, neg_lse[i / 2]));
      }
    }
  }

  // -inf for keys that the query does not see.
  CUTE_DEVICE void apply_mask(int first_key) {
    int const thread = opaque(thread_of_group<Arch>());
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const row = group * 64 + thread / 32 * 16 + half * 8 + thread % 32 / 4;
      int32_t sees[2];
      Arch::load_shared(Arch::smem_address(shared.keys_of_query[row]), sees);
      int const place = first_key + thread % 4 * 2;
      int const begin = sees[0] - place, end = sees[1] - place;
      CUTE_UNROLL
      for (int n = 0; n < kN / 8; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float& x = s(2 * half + i, 0, n);
          x = n * 8 + i >= begin && n * 8 + i < end ? x : -kInf;
        }
      }
    }
  }
};

}  // namespace cutlass_attn::sm90
