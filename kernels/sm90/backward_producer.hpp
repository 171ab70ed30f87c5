// The producer warp: copies K and V of a tile of keys, and Q, dO and the statistics of each step.
// Persistent blocks: it also takes the tiles, and publishes them.
#pragma once

#include "core/vector.hpp"
#include "sm90/backward_map_steps.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct BackwardProducer {
  using Shared = typename Config::SharedStorage;
  using TileKv = typename Config::TileKv;
  using TileQ = typename Config::TileQ;

  using Params = typename Config::Params;
  static constexpr int kBiasBytes = Config::kHasBias ? Config::TileS::kBytes : 0;
  using Stats = Quad;  // of two queries

  Params const& params;
  Shared& shared;
  int const stage;  // of K and the KeyTile; also the round of V, which has one stage
  int const steps;
  std::conditional_t<Config::kHasMask, MapSteps<Config, Arch>, BackwardSteps<Config>> at;
  Ring<Config::kStages> ring;
  Stats stats[Config::kTiles];  // of this lane's queries in the next step

  // ring: of the first step.
  CUTE_DEVICE BackwardProducer(Params const& params, Shared& shared, int stage = 0,
                               Ring<Config::kStages> const& ring = {})
      : params(params),
        shared(shared),
        stage(stage),
        steps(shared.tiles[stage].num_steps),
        at(params, shared.tiles[stage]),
        ring(ring) {}

  CUTE_DEVICE void run() {
    if (!Config::kIsPersistent && steps == 0) return;
    begin();
    CUTE_NO_UNROLL
    while (at.number < steps) next();
  }

  // Copies K and V, and as many steps as there are stages. In a persistent block, V comes after the
  // first step: its buffer is released last.
  CUTE_DEVICE void begin() {
    load_keys(params.k, shared.k[stage], &shared.tile_full[stage]);
    if constexpr (Config::kHasMask) {
      if (steps > 0) at.begin();
    }
    if constexpr (Config::kIsPersistent) {
      next();
      Arch::mbarrier_wait(&shared.v_empty, stage ^ 1);
    }
    load_keys(params.v, shared.v, &shared.v_full);
    CUTE_NO_UNROLL
    for (int i = Config::kIsPersistent; i < Config::kStages; ++i) next();
  }

  // Copies the next step, if there is one, once its stage is empty.
  CUTE_DEVICE void next() {
    load_stats();
    copy();
  }

  // The two halves of next(). load_stats() loads the statistics into registers, while the stage may
  // still be in use. copy() waits for the stage and does the rest.
  CUTE_DEVICE void load_stats() {
    if (at.number < steps) read_stats(Arch::thread());
  }
  CUTE_DEVICE void copy() {
    if (at.number == steps) return;
    int const lane = Arch::thread();
    Arch::mbarrier_wait(&shared.empty[ring.stage], ring.round ^ 1);
    CUTE_UNROLL
    for (int i = 0; i < Config::kTiles; ++i) {
      reinterpret_cast<Stats*>(shared.stats[ring.stage])[i * 32 + lane] = stats[i];
    }
    if constexpr (Config::kHasMask) {
      if (lane == 0) key_tile().steps[at.number % kMapSteps] = at.published();
    }
    Arch::sync_warp();
    if (Arch::elect()) {
      int const first = at.tile * Config::kBlockM;
      SequenceRows const rows = query_rows(key_tile().seq, params.problem);
      load<TileQ, kBiasBytes>(params.q, shared.q[ring.stage], &shared.q_full[ring.stage], first,
                              at.head, rows);
      load<TileQ>(params.grad_o, shared.grad_o[ring.stage], &shared.grad_o_full[ring.stage], first,
                  at.head, rows);
      if constexpr (Config::kHasBias) load_bias(first);
    }
    advance();
    ring.advance();
  }

 private:
  CUTE_DEVICE auto& key_tile() const { return shared.tiles[stage]; }
  CUTE_DEVICE void advance() {
    if constexpr (Config::kHasMask) {
      at.advance(steps);
    } else {
      at.advance(key_tile().range);
    }
  }

  static_assert(sizeof(stats) * 32 == sizeof(Shared::stats[0]),
                "a lane has those of two queries of a tile");

  CUTE_DEVICE void read_stats(int lane) {
    int64_t const first = at.number_of(params, key_tile().tile.batch);
    constexpr int kRows = MmaBackwardParams::kTileRows;
    CUTE_UNROLL
    for (int i = 0; i < Config::kTiles; ++i) {
      if (has_tile<Config>(params, key_tile(), at.tile, i)) {
        stats[i] = reinterpret_cast<Stats const*>(params.stats + (first + i) * (kRows * 2))[lane];
      } else {
        stats[i] = {-kInf, 0.0f, -kInf, 0.0f};  // no weights
      }
    }
  }

  // Copies the bias into the stage of dS, once dQ of that stage's previous dS has been multiplied.
  // It arrives with Q.
  CUTE_DEVICE void load_bias(int first_query) const {
    using TileBias = typename Config::TileBias;
    RowTile const& keys = key_tile().tile;
    Arch::mbarrier_wait(&shared.grad_s_empty[ring.stage], ring.round ^ 1);
    CUTE_UNROLL
    for (int i = 0; i < Config::kGroups; ++i) {
      Arch::tma_load(shared.grad_s[ring.stage] + i * TileBias::kBytes, params.bias,
                     &shared.q_full[ring.stage], keys.begin + i * 64, 0, first_query, at.head,
                     keys.batch);
    }
  }

  // Copies K or V of a tile with steps.
  template <class Rows>
  CUTE_DEVICE void load_keys(Rows const& from, char* to, arch::Barrier* full) const {
    if (!Arch::elect()) return;
    if (Config::kIsPersistent && steps == 0) return Arch::mbarrier_arrive(full);
    RowTile const& keys = key_tile().tile;
    SequenceRows const rows = key_rows(key_tile().seq, params.problem);
    load<TileKv>(from, to, full, keys.begin, keys.head, rows);
  }

  // kMoreBytes: bytes of other copies that the barrier counts.
  template <class Tile, int kMoreBytes = 0, class Rows>
  CUTE_DEVICE void load(Rows const& from, char* to, arch::Barrier* full, int row, int head,
                        SequenceRows const& of) const {
    Arch::mbarrier_arrive_expect_tx(full, Tile::kBytes + kMoreBytes);
    copy_boxes<Tile, Arch>(from, to, full, row, head, of);
  }
};

}  // namespace cutlass_attn::sm90
