// What is copied for the warpgroups that share a tile's keys: Q once, and of K and V each of them
// has tiles and buffers of its own.
#pragma once

#include "sm90/split_keys_config.hpp"

namespace cutlass_attn::sm90 {

// Of one warpgroup.
template <class Config, class Arch>
struct SplitKeysCopy {
  using Shared = typename Config::SharedStorage;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kN = Config::kBlockN;

  ClusterSplitsParams const& params;
  Shared& shared;
  int const group;  // of the block

  // In one thread of the block.
  CUTE_DEVICE static void make_barriers(Shared& shared) {
    Arch::barrier_init(&shared.q_full, 1);
    for (int g = 0; g < Config::kGroups; ++g) {
      for (int i = 0; i < Config::kKStages; ++i) Arch::barrier_init(&shared.k_full[g][i], 1);
      for (int i = 0; i < Config::kVStages; ++i) Arch::barrier_init(&shared.v_full[g][i], 1);
    }
    Arch::barrier_init_fence();
  }

  // The first copies of the block, by threads of two warps. What can be done before grids before
  // are done is. An SM is given some 60 bytes a clock, so what is wanted first is asked for first;
  // and as the warpgroups then begin one after the other, one multiplies while another has the
  // exponentials to itself.
  CUTE_DEVICE static void begin(ClusterSplitsParams const& params, Shared& shared) {
    if (Arch::thread() == 32) {
      Arch::tma_prefetch(params.q);
      copy_q(params, shared);
    }
    if (Arch::thread() == 0) {
      Arch::tma_prefetch(params.k.map);
      Arch::tma_prefetch(params.v.map);
      TileRange const range = shared.block.range;
      Arch::wait_for_grids_before();
      for (int i = 0; i < Config::kKStages; ++i) {
        for (int g = 0; g < Config::kGroups; ++g) {
          SplitKeysCopy const copy{params, shared, g};
          int const key = copy.first_key(range) + i * copy.stride();
          copy.k(range, key, i);
          if (i < Config::kVStages) copy.v(range, key, i);
        }
      }
    }
  }

  // The first tile of keys of this warpgroup, and from one to the next.
  CUTE_DEVICE int first_key(TileRange const& range) const {
    return range.begin + (params.rank<Arch>() * Config::kGroups + group) * kN;
  }
  CUTE_DEVICE int stride() const { return params.blocks * Config::kGroups * kN; }

  // In one thread: the tile that begins at `key`, if there is one.
  CUTE_DEVICE void k(TileRange const& range, int key, int stage) const {
    if (key >= range.end) return;
    copy<TileK>(params.k, shared.buffers[group].k[stage], &shared.k_full[group][stage], key);
  }
  CUTE_DEVICE void v(TileRange const& range, int key, int stage) const {
    if (key >= range.end) return;
    copy<TileV>(params.v, shared.buffers[group].v[stage], &shared.v_full[group][stage], key);
  }

 private:
  CUTE_DEVICE static void copy_q(ClusterSplitsParams const& params, Shared& shared) {
    Arch::barrier_expect(&shared.q_full, TileQ::kBytes);
    TileCoord const& tile = shared.tile();
    int const query = tile.q_begin, head = tile.head_q / tile.heads, batch = tile.seq.batch;
    Arch::wait_for_grids_before();
    CUTE_UNROLL
    for (int c = 0; c < TileQ::kChunks; ++c) {
      Arch::tma_load(shared.q + c * TileQ::kChunkBytes, params.q, &shared.q_full, c * 64, 0, query,
                     head, batch);
    }
  }
  template <class Tile>
  CUTE_DEVICE void copy(DenseRows const& from, char* to, arch::Barrier* full, int key) const {
    TileCoord const& tile = shared.tile();
    Arch::barrier_expect(full, Tile::kBytes);
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      from.load<Arch>(to + c * Tile::kChunkBytes, full, c * 64, key, tile.head_kv,
                      key_rows(tile.seq, params.forward.problem));
    }
  }
};

}  // namespace cutlass_attn::sm90
