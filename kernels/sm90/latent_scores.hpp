// The warpgroup that computes S and softmax of all keys, for the output warpgroups.
#pragma once

#include "core/score.hpp"
#include "sm90/latent_cluster.hpp"
#include "sm90/latent_queries.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct LatentScores {
  using Shared = typename Config::SharedStorage;
  using Element = typename Config::Element;
  using Place = typename Config::Place;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using S = Fragment<float, 1, Config::kBlockN / 8>;
  static constexpr int kN = Config::kBlockN, kRows = Config::kRows, kStages = Config::kStages;
  static constexpr int kKeptSteps = Config::kKeptChunks * 4, kSteps = Config::kHeadDim / 16;

  Problem const& p;
  Shared& shared;
  int const thread = Arch::thread() % Config::kGroupThreads, lane = thread % 32;
  LatentCluster<Config, Arch> const cluster;
  typename Config::Coord const& tile;
  FragmentScores<Arch, Score, Place, kRows, false, typename Config::Coord> const scores;
  float const log2_scale;
  int const full_begin, full_end;  // of scores.range, which is in shared memory
  uint32_t q[kKeptSteps][4];
  S s;
  SoftmaxRows<Arch, kRows> softmax = {};
  Ring<kStages> k = {};
  Ring<Config::kWeights> out = {};

  CUTE_DEVICE LatentScores(typename Config::Params const& params, Shared& shared)
      : p(params.problem),
        shared(shared),
        cluster{params, shared},
        tile(shared.block.tile),
        scores{p,
               score_in_log2<Score>(p, tile.seq.lens(p), scale_of(p.k, tile.head_kv)),
               Place{thread},
               tile,
               shared.block.range,
               shared.block.interval},
        log2_scale(scores.score.log2_scale()),
        full_begin(shared.block.range.full_begin),
        full_end(shared.block.range.full_end) {}

  CUTE_DEVICE void run() {
    int const first = shared.block.first, last = shared.block.last;
    LatentQueries<Config, Arch>{p, shared}.load(q);
    CUTE_NO_UNROLL
    for (int key = first; key < last; key += kN) {
      // P of the tile before is published after S of this tile, so that P V overlaps softmax; but
      // before it if S has to wait for a copy, since copies wait for P V of earlier tiles.
      bool const is_there = Arch::mbarrier_has_ended(&shared.k_full[k.stage], k.round);
      bool const publishes_first = !Arch::any(is_there);
      if (key > first && publishes_first) publish();
      multiply();
      if (key > first && !publishes_first) publish();
      softmax_of_tile(key);
    }
    if (first < last) publish();
    softmax.complete_sums();
    wait_for_room();
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (lane % 4 == 0) shared.rows[Place{thread}.row(i)] = softmax.rows[i];
    }
    publish();
    cluster.leave();
  }

 private:
  // S of the next tile.
  CUTE_DEVICE void multiply() {
    Arch::mbarrier_wait(&shared.k_full[k.stage], k.round);
    // opaque: without it, the compiler keeps the descriptors of all steps, in local memory.
    auto const rows = opaque(Arch::descriptor(shared.q, 16, 1024));
    auto const keys = Arch::descriptor(shared.k[k.stage], 16, TileK::kGroupBytes);
    Arch::wgmma_fence(s.x, q);
    CUTE_UNROLL
    for (int i = 0; i < kKeptSteps; ++i) {
      Arch::template wgmma_rt<Element>(s.x, q[i], keys + column_step<TileK>(i), i != 0);
    }
    CUTE_UNROLL
    for (int i = kKeptSteps; i < kSteps; ++i) {
      Arch::template wgmma_ss<Element>(s.x, rows + column_step<TileQ>(i - kKeptSteps),
                                       keys + column_step<TileK>(i), true);
    }
    Arch::wgmma_commit();
    Arch::template wgmma_wait<0>(s.x, q);
    if constexpr (Config::kHasOwnValues) {
      // Each warp has waited for its own products.
      cluster.release(k.stage, lane, Config::kScoreArrivals);
    }
  }

  // Softmax of the tile at `key`; stores P and the factors, without publishing them.
  CUTE_DEVICE void softmax_of_tile(int key) {
    auto const rows = as_rows(s);
    if (key >= full_begin && key < full_end) {
      scores.apply(rows, key, std::true_type{});
    } else {
      scores.apply(rows, key, std::false_type{});
    }
    if (p.kv.indices) mask_absent(k.stage);
    CUTE_UNROLL
    for (int i = 0; i < Config::kTilesOfStep; ++i) k.advance();
    float factors[kRows];
    compute_weights(rows, factors);
    softmax.add_sums();
    wait_for_room();
    auto& to = shared.weights[out.stage];
    CUTE_UNROLL
    for (int n = 0; n < kN / 16; ++n) {
      float const(&x)[4] = s.block(0, 2 * n), (&y)[4] = s.block(0, 2 * n + 1);
      to.p[n][thread] = {
          {Arch::template pack<Element>(x[0], x[1]), Arch::template pack<Element>(x[2], x[3]),
           Arch::template pack<Element>(y[0], y[1]), Arch::template pack<Element>(y[2], y[3])}};
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (lane % 4 == 0) to.factors[Place{thread}.row(i)] = factors[i];
    }
  }

  // P of a tile from its scores, and the factors by which O is to be multiplied before it is added.
  // The row max lags (tile/softmax_rows.hpp), so that O is rarely rescaled, unless the largest
  // logit is wanted.
  template <class Rows>
  CUTE_DEVICE void compute_weights(Rows const& rows, float (&factors)[kRows]) {
    if constexpr (Score::kKeepsMaxLogit) {
      softmax.softmax_weights_after_max(rows, factors, log2_scale);
    } else {
      Fragment<float, 1, 1> ones;  // rescaled in place of O
      for (float& x : ones.x) x = 1.0f;
      softmax.update_max_checked(rows, as_rows(ones), log2_scale);
      softmax.softmax_weights_of_max(rows, log2_scale);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) factors[i] = as_rows(ones)(i, 0);
    }
  }

  // Masks list entries that are no keys.
  CUTE_DEVICE void mask_absent(int stage) {
    auto const rows = as_rows(s);
    CUTE_UNROLL
    for (int j = 0; j < columns_of<decltype(rows)>; ++j) {
      // A thread has four columns of each unit.
      int const in_unit = Place{thread}.column(j) % Config::kUnit;
      bool const is_key = shared.present[stage][j / 4] >> in_unit & 1;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) rows(i, j) = is_key ? rows(i, j) : -kInf;
    }
  }

  CUTE_DEVICE void wait_for_room() {
    Arch::mbarrier_wait(&shared.p_empty[out.stage], out.round ^ 1);
  }
  CUTE_DEVICE void publish() {
    Arch::sync_warp();  // all lanes have stored P and factors
    if (lane == 0) Arch::mbarrier_arrive(&shared.p_full[out.stage]);
    out.advance();
  }
};

}  // namespace cutlass_attn::sm90
