// Copies for warpgroups that split the keys of a tile: Q once for all, K and V into the buffers of
// each warpgroup.
#pragma once

#include "sm90/split_keys_config.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct SplitKeysCopy {
  using Shared = typename Config::SharedStorage;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kN = Config::kBlockN;

  ClusterSplitsParams const& params;
  Shared& shared;
  TileCoord const& tile;
  TileRange const& range;  // in keys

  // In one thread of the block: initialises the barriers and sets the bytes of the first copies. No
  // warp waits for a key tile that does not exist.
  CUTE_DEVICE static void make_barriers(ClusterSplitsParams const& params, Shared& shared) {
    Arch::prefetch_tensormap(params.k.map);
    Arch::prefetch_tensormap(params.q);
    Arch::prefetch_tensormap(params.v.map);
    Arch::mbarrier_init(&shared.q_full, 1);
    for (int g = 0; g < Config::kGroups; ++g) {
      for (auto& full : shared.k_full[g]) Arch::mbarrier_init(&full, 1);
      for (auto& full : shared.v_full[g]) Arch::mbarrier_init(&full, 1);
    }
    Arch::fence_mbarrier_init();
    Arch::mbarrier_arrive_expect_tx(&shared.q_full, TileQ::kBytes);
    for (int g = 0; g < Config::kGroups; ++g) {
      for (auto& full : shared.k_full[g]) Arch::mbarrier_arrive_expect_tx(&full, TileK::kBytes);
      for (auto& full : shared.v_full[g]) Arch::mbarrier_arrive_expect_tx(&full, TileV::kBytes);
    }
  }

  // In one thread: copies Q and as many key tiles as there are stages. An SM receives about 60
  // bytes per clock, so data that is needed first is copied first. Warpgroups then begin one after
  // the other, and one multiplies while another computes exponentials.
  CUTE_DEVICE void begin() const {
    int const heads = tile.by_heads(tile.head_q);  // index of the head group
    Arch::griddepcontrol_wait();
    CUTE_UNROLL
    for (int c = 0; c < TileQ::kChunks; ++c) {
      Arch::tma_load(shared.q + c * TileQ::kChunkBytes, params.q, &shared.q_full, c * 64, 0,
                     tile.q_begin, heads, tile.seq.batch);
    }
    for (int g = 0; g < Config::kGroups; ++g) {
      CUTE_UNROLL
      for (int i = 0; i < Config::kKStages; ++i) load_k(g, first_key(g) + i * stride(), i);
    }
    for (int g = 0; g < Config::kGroups; ++g) {
      CUTE_UNROLL
      for (int i = 0; i < Config::kVStages; ++i) load_v(g, first_key(g) + i * stride(), i);
    }
  }

  // First key tile of a warpgroup, and the distance to its next one.
  CUTE_DEVICE int first_key(int group) const {
    return range.begin + (params.rank<Arch>() * Config::kGroups + group) * kN;
  }
  CUTE_DEVICE int stride() const { return params.blocks * Config::kGroups * kN; }

  // In one thread: copies the tile of K or V that begins at `key`, if it exists.
  CUTE_DEVICE void k(int group, int key, int stage) const {
    if (key < range.end)
      Arch::mbarrier_arrive_expect_tx(&shared.k_full[group][stage], TileK::kBytes);
    load_k(group, key, stage);
  }
  CUTE_DEVICE void v(int group, int key, int stage) const {
    if (key < range.end)
      Arch::mbarrier_arrive_expect_tx(&shared.v_full[group][stage], TileV::kBytes);
    load_v(group, key, stage);
  }

 private:
  // As k() and v(), when the barrier already expects the bytes.
  CUTE_DEVICE void load_k(int group, int key, int stage) const {
    load<TileK>(params.k, shared.buffers[group].k[stage], &shared.k_full[group][stage], key);
  }
  CUTE_DEVICE void load_v(int group, int key, int stage) const {
    load<TileV>(params.v, shared.buffers[group].v[stage], &shared.v_full[group][stage], key);
  }
  template <class Tile>
  CUTE_DEVICE void load(DenseRows const& from, char* to, arch::Barrier* full, int key) const {
    if (key >= range.end) return;
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      from.load<Arch>(to + c * Tile::kChunkBytes, full, c * 64, key, tile.head_kv,
                      key_rows(tile.seq, params.forward.problem));
    }
  }
};

}  // namespace cutlass_attn::sm90
