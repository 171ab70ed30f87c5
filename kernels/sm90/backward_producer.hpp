// The warp that copies: K and V once, then Q, dO and the statistics of one step after the other.
#pragma once

#include "sm90/backward_config.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct BackwardProducer {
  using Shared = typename Config::SharedStorage;
  using TileKv = typename Config::TileKv;
  using TileQ = typename Config::TileQ;
  using Position = BackwardPosition;

  BackwardParams const& params;
  Shared& shared;
  int const steps;

  CUTE_DEVICE void run() const {
    int const lane = Arch::thread();
    sm80::RowTile const& tile = shared.block.tile;
    if (lane == 0) {
      load<TileKv>(params.k, shared.k, &shared.k_full, tile.begin, tile.head);
      load<TileKv>(params.v, shared.v, &shared.v_full, tile.begin, tile.head);
    }
    TileRange const range = shared.block.range;
    Position at = {tile.head * params.heads_per_kv, range.begin, 0};
    Ring<Config::kStages> ring;
    CUTE_NO_UNROLL
    for (; at.number < steps; at = at.next(range), ring.advance()) {
      Stats const stats = stats_of(at, lane);  // from memory, while the stage is still read
      Arch::barrier_wait(&shared.empty[ring.stage], ring.round ^ 1);
      reinterpret_cast<Stats*>(shared.stats[ring.stage])[lane] = stats;
      Arch::sync_warp();
      if (lane != 0) continue;
      int const first = at.tile * Config::kBlockM;
      load<TileQ>(params.q, shared.q[ring.stage], &shared.q_full[ring.stage], first, at.head);
      load<TileQ>(params.grad_o, shared.grad_o[ring.stage], &shared.grad_o_full[ring.stage], first,
                  at.head);
    }
  }

 private:
  struct alignas(16) Stats {  // of two queries
    float of[4];
  };
  static_assert(sizeof(Stats) * 32 == sizeof(Shared::stats[0]), "a lane has those of two queries");

  CUTE_DEVICE Stats stats_of(Position const& at, int lane) const {
    int64_t const tile = params.queries.template number<Config::kBlockM, false>(
        params.problem.seq_q, {shared.block.tile.batch, at.head, at.tile * Config::kBlockM});
    return reinterpret_cast<Stats const*>(params.stats + tile * Config::kBlockM * 2)[lane];
  }

  template <class Tile>
  CUTE_DEVICE void load(TensorMap const& from, char* to, arch::Barrier* full, int row,
                        int head) const {
    Arch::barrier_expect(full, Tile::kBytes);
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      Arch::tma_load(to + c * Tile::kChunkBytes, from, full, c * 64, row, head,
                     shared.block.tile.batch, 0);
    }
  }
};

}  // namespace cutlass_attn::sm90
