// An output warpgroup: multiplies P by its columns of V, and stores its columns of O.
#pragma once

#include "core/epilogue.hpp"
#include "core/terms/max_logit.hpp"
#include "latent/merge.hpp"
#include "sm90/latent_cluster.hpp"
#include "sm90/latent_queries.hpp"
#include "tile/quad_rows.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct LatentOutput {
  using Shared = typename Config::SharedStorage;
  using Element = typename Config::Element;
  using TileK = typename Config::TileK;
  static constexpr int kN = Config::kBlockN, kRows = Config::kRows;
  static constexpr int kThreads = Config::kOutputGroups * Config::kGroupThreads;
  static constexpr int kFirst = Config::kThreads - kThreads;  // first thread

  // P V is issued in two halves of the columns: in a kernel that starts with 128 registers per
  // thread, ptxas (CUDA 13.0) accepts no wgmma of 256 columns.
  static constexpr int kParts = 2, kPartSize = Config::kColumns / 2 / kParts;

  using Place = typename Config::Place;  // all warpgroups have all 64 rows
  using Split = SplitResult<Config::kBlockM, Config::kHeadDimV>;
  struct Result {
    Fragment<float, 1, Config::kColumns / 8> acc_o;
    SoftmaxRows<Arch, kRows> softmax;
  };

  typename Config::Params const& params;
  Shared& shared;
  LatentCluster<Config, Arch> const cluster{params, shared};
  int const group = Arch::uniform((Arch::thread() - kFirst) / Config::kGroupThreads);
  Result result = {};

  CUTE_DEVICE void run() {
    LatentQueries<Config, Arch>{params.problem, shared}.copy();
    Ring<Config::kStages> v;
    Ring<Config::kWeights> in;
    CUTE_NO_UNROLL
    for (int key = shared.block.first; key < shared.block.last; key += kN) {
      if constexpr (Config::kHasOwnValues) {
        v.advance();  // beyond K
        Arch::mbarrier_wait(&shared.k_full[v.stage], v.round);
      }
      Arch::mbarrier_wait(&shared.p_full[in.stage], in.round);
      step(shared.k[v.stage], in.stage);
      cluster.release(v.stage, Arch::thread() % 32);
      v.advance();
      in.advance();
    }
    Arch::mbarrier_wait(&shared.p_full[in.stage], in.round);
    Place const place{Arch::thread() % Config::kGroupThreads};
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) result.softmax.rows[i] = shared.rows[place.row(i)];
    cluster.leave();  // stages unused
    if (params.splits.count == 1) {
      finish(place);
    } else {
      int const block = Arch::block();
      store(place, Split::of(params.splits, params.unit(block), params.split(block)));
    }
  }

 private:
  // O += P V of a tile.
  CUTE_DEVICE void step(char const* tile, int stage) {
    auto const& from = shared.weights[stage];
    int const thread = Arch::thread() % Config::kGroupThreads;
    uint32_t p[kN / 16][4];
    float factors[kRows];
    CUTE_UNROLL
    for (int n = 0; n < kN / 16; ++n) {
      typename Config::Words const words = from.p[n][thread];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) p[n][i] = words.words[i];
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      factors[i] = from.factors[typename Config::Place{thread}.row(i)];
    }
    Arch::sync_warp();  // read by all lanes
    if (thread % 32 == 0) Arch::mbarrier_arrive(&shared.p_empty[stage]);
    bool const changes = factors[0] != 1.0f || factors[1] != 1.0f;
    unpredicated_if(Arch::any(changes), [&] {
      for (int i = 0; i < kRows; ++i) result.softmax.scale(as_rows(result.acc_o), i, factors[i]);
    });
    constexpr int kOwnBytes = Config::kColumns / 64 * TileK::kChunkBytes;
    auto const values =
        Arch::descriptor(tile + group * kOwnBytes, TileK::kChunkBytes, TileK::kGroupBytes);
    auto& o = result.acc_o.x;
    Arch::wgmma_fence(o, p);
    CUTE_UNROLL
    for (int i = 0; i < kN / 16 * kParts; ++i) {
      int const n = i % (kN / 16), part = i / (kN / 16);
      auto& columns = reinterpret_cast<float (&)[kPartSize]>(o[part * kPartSize]);
      auto const at = values + part * kPartSize / 32 * TileK::kChunkBytes / 16;
      Arch::template wgmma_rs<Element>(columns, p[n], at + n * 2 * TileK::kGroupBytes / 16, true);
    }
    Arch::wgmma_commit();
    Arch::template wgmma_wait<0>(o, p);
  }

  // Stores the columns of O and the state of the rows, for the launch that merges splits.
  CUTE_DEVICE void store(Place const& place, Split const& to) const {
    int const row_block = place.thread / 32;
    if (row_block * 16 >= shared.block.tile.rows) return;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (group == 0 && place.column(0) == 0) to.state(place.row(i)) = result.softmax.rows[i];
    }
    to.store(result.acc_o, row_block, group * Config::kColumns / 8, place.thread % 32);
  }

  // Normalises and stores the columns of O, LSE, and the largest logits.
  CUTE_DEVICE void finish(Place const& place) {
    Problem const& p = params.problem;
    auto const& tile = shared.block.tile;
    int const lane = place.thread % 32;
    auto const o = as_rows(result.acc_o);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = place.row(i);
      bool const is_row = row < tile.rows;
      int const at = is_row ? row : 0;
      bool const writes_lse = is_row && group == 0 && place.column(0) == 0;
      if constexpr (Score::kKeepsMaxLogit) {
        float const largest = result.softmax.rows[i].max;
        if (writes_lse) MaxLogit::store(p, tile.seq, tile.head(at), tile.query(at), largest);
      }
      float const factor = finish_row(p, tile.seq, tile.head(at), tile.query(at),
                                      result.softmax.rows[i], 1.0f, writes_lse) *
                           scale_of(p.v, tile.head_kv);
      Element* const target = tile.template row_of<Element>(p.o, at);
      CUTE_UNROLL
      for (int n = 0; n < Config::kColumns / 8; n += 4) {
        uint32_t words[4];
        CUTE_UNROLL
        for (int b = 0; b < 4; ++b) {
          int const j = 2 * (n + b);
          words[b] = Arch::template pack<Element>(o(i, j) * factor, o(i, j + 1) * factor);
        }
        store_columns<Arch>(target, words, group * Config::kColumns / 8 + n, p.head_dim_v, is_row,
                            lane);
      }
    }
  }
};

}  // namespace cutlass_attn::sm90
