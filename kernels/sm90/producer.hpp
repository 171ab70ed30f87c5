// The thread that copies: takes tiles from the counter, says what they are, and keeps the buffers
// of Q, K and V full.
#pragma once

#include "sm90/config.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct Producer {
  using Shared = typename Config::SharedStorage;
  using Info = typename Config::TileInfo;
  using Coord = typename Config::Coord;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kN = Config::kBlockN;

  TmaParams const& params;
  Shared& shared;
  Ring<Config::kQStages> q = {};
  Ring<Config::kKStages> k = {};
  Ring<Config::kVStages> v = {};
  Ring<Config::kInfos> info_ring = {};

  CUTE_DEVICE void run() {
    Arch::tma_prefetch(params.q);
    Arch::tma_prefetch(params.k);
    Arch::tma_prefetch(params.v);
    int const tiles = int(params.forward.scheduler.blocks);
    for (int tile = Arch::block(); tile < tiles; tile = next(tile, tiles)) {
      Info& info = publish(tile);
      copy_tile(info);
    }
    Arch::barrier_wait(&shared.info_empty[info_ring.stage], info_ring.round ^ 1);
    shared.info(info_ring.stage).is_there = 0;
    Arch::barrier_arrive(&shared.info_full[info_ring.stage]);
  }

 private:
  // The last of all to ask leaves the counter at 0: every block asks until there is no tile left.
  CUTE_DEVICE int next(int, int tiles) {
    if (params.counter == nullptr) return tiles;
    int const taken = Arch::fetch_add(params.counter, 1);
    if (taken == tiles - 1) Arch::fetch_add(params.counter, -tiles);
    return params.blocks + taken;
  }

  CUTE_DEVICE Info& publish(int block) {
    Problem const& p = params.forward.problem;
    Arch::barrier_wait(&shared.info_empty[info_ring.stage], info_ring.round ^ 1);
    Info& info = shared.info(info_ring.stage);
    Coord const tile(p, params.forward.scheduler, Config::kBlockM, block);
    IntervalMask const mask = params.forward.template mask<Score::kHasChunks>(tile.seq.lens(p));
    TileRange range = mask.tiles(tile.q_begin, tile.q_end, kN);
    if (range.begin >= range.end) {
      // Keys beyond the last, which are zeros: rows without keys go the way of all others.
      int const beyond = (p.seq_k.seqlen + kN - 1) / kN + 1;
      range = {beyond, beyond + 1, 0, 0};
    }
    info.is_there = 1;
    info.tile = tile;
    info.range = range.in_keys(kN);
    info.interval = mask.near(tile.q_begin);
    CUTE_NO_UNROLL
    for (int i = 0; i < Config::kGroups; ++i) set_range(mask, range, i, info);
    Arch::barrier_arrive(&shared.info_full[info_ring.stage]);
    info_ring.advance();
    return info;
  }

  // The keys of a warpgroup's rows: at least one tile of those that are copied.
  CUTE_DEVICE static void set_range(IntervalMask const& mask, TileRange const& all, int group,
                                    Info& info) {
    Coord const& tile = info.tile;
    TileRange range = {all.begin, all.begin + 1, 0, 0};
    int end = 0;  // of the keys that the last row sees, and so any
    int const first = group * Config::kGroupRows;
    if (first < tile.rows) {
      int const last =
          first + Config::kGroupRows < tile.rows ? first + Config::kGroupRows : tile.rows;
      int const query = tile.query(last - 1);
      TileRange const own = mask.tiles(tile.query(first), query + 1, kN);
      if (own.begin < own.end) range = own;
      end = mask.hi(query);
    }
    info.ranges[group] = range.in_keys(kN);
    info.is_half[group] = end <= info.ranges[group].end - kN + Config::kHalf;
  }

  CUTE_DEVICE void copy_tile(Info const& info) {
    int const first = info.range.end - kN;
    // Two buffers of Q: while others are still at the tile before. One: K does not wait for that.
    if constexpr (Config::kQStages > 1) copy_q(info);
    copy_k(info, first);
    if constexpr (Config::kQStages == 1) copy_q(info);
    CUTE_NO_UNROLL
    for (int key = first; key >= info.range.begin; key -= kN) {
      if (key > info.range.begin) copy_k(info, key - kN);
      copy_v(info, key);
    }
  }

  CUTE_DEVICE void copy_q(Info const& info) {
    Coord const& tile = info.tile;
    CUTE_UNROLL
    for (int i = 0; i < Config::kGroups; ++i) {
      arch::Barrier* const full = &shared.q_full[q.stage][i];
      Arch::barrier_wait(&shared.q_empty[q.stage][i], q.round ^ 1);
      Arch::barrier_expect(full, TileQ::kBytes);
      int const query = tile.query(i * Config::kGroupRows), group = tile.head_q / tile.heads;
      CUTE_UNROLL
      for (int c = 0; c < TileQ::kChunks; ++c) {
        Arch::tma_load(shared.q[q.stage][i] + c * TileQ::kChunkBytes, params.q, full, c * 64, 0,
                       query, group, tile.seq.batch);
      }
    }
    q.advance();
  }

  CUTE_DEVICE void copy_k(Info const& info, int key) {
    copy<TileK>(params.k, shared.k[k.stage], &shared.k_full[k.stage], &shared.k_empty[k.stage],
                k.round, info.tile, key);
    k.advance();
  }
  CUTE_DEVICE void copy_v(Info const& info, int key) {
    copy<TileV>(params.v, shared.v[v.stage], &shared.v_full[v.stage], &shared.v_empty[v.stage],
                v.round, info.tile, key);
    v.advance();
  }

  template <class Tile>
  CUTE_DEVICE static void copy(TensorMap const& map, char* to, arch::Barrier* full,
                               arch::Barrier* empty, int round, Coord const& tile, int key) {
    Arch::barrier_wait(empty, round ^ 1);
    Arch::barrier_expect(full, Tile::kBytes);
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      Arch::tma_load(to + c * Tile::kChunkBytes, map, full, c * 64, key, tile.head_kv,
                     tile.seq.batch, 0);
    }
  }
};

}  // namespace cutlass_attn::sm90
