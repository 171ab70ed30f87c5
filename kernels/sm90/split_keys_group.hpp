// A warpgroup that has a share of a tile's keys, and makes its part of O of them.
//
// Nothing is pipelined within it: while it waits another one multiplies, and where keys are few all
// copies are on their way from the beginning.
#pragma once

#include "sm80/products.hpp"
#include "sm90/split_keys_config.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct SplitKeysGroup {
  using Element = typename Config::Element;
  using Shared = typename Config::SharedStorage;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using Step = sm80::Products<Config, Score, Arch>;
  using Softmax = SoftmaxRows<Arch, Config::kRows>;
  using Scores = FragmentScores<Arch, Score, typename Config::Place, Config::kRows, false>;
  static constexpr int kN = Config::kBlockN;

  ClusterSplitsParams const& params;
  Shared& shared;
  int const group;  // of the block
  Softmax softmax = {};
  typename Step::S acc_s[1];  // of a tile of keys
  typename Step::O acc_o;
  typename Step::P p;

  CUTE_DEVICE SplitKeysGroup(ClusterSplitsParams const& params, Shared& shared, int group)
      : params(params), shared(shared), group(group) {}

  // In one thread, before all others: the first copies.
  CUTE_DEVICE void begin(TileCoord const& tile, TileRange const& range) {
    Arch::barrier_init(&shared.k_full[group], 1);
    Arch::barrier_init(&shared.v_full[group], 1);
    if (group == 0) Arch::barrier_init(&shared.q_full, 1);
    Arch::barrier_init_fence();
    Arch::wait_for_grids_before();
    int const key = first_key(range);
    if (group == 0) copy_q(tile);
    if (key >= range.end) return;
    copy_k(tile, key);
    copy_v(tile, key);
  }

  CUTE_DEVICE void run() {
    TileRange const range = shared.block.range;
    Score const score(params.forward.problem);
    float const log2_scale = score.log2_scale();
    Scores const scores{
        params.forward.problem, score, {thread()}, shared.tile(), shared.block.range,
        shared.block.interval};
    clear(acc_o);
    int const first = first_key(range), step = params.blocks * Config::kGroups * kN;
    int round = 0;
    Arch::barrier_wait(&shared.q_full, 0);
    CUTE_NO_UNROLL
    for (int key = first; key < range.end; key += step, round ^= 1) {
      bool const has_next = key + step < range.end;
      multiply_qk(round);
      if (has_next) {
        sync_group();  // K empty
        if (thread() == 0) copy_k(shared.tile(), key + step);
      }
      auto s = as_rows(acc_s[0]);
      if (range.is_full(key)) {
        scores.apply(s, key, true_type{});
      } else {
        scores.apply(s, key, false_type{});
      }
      float factors[Config::kRows];
      softmax.softmax_weights_after_max(s, factors, log2_scale);
      softmax.add_sums();
      unpredicated_if(key != first, [&] {
        for (int i = 0; i < Config::kRows; ++i) softmax.scale(as_rows(acc_o), i, factors[i]);
      });
      Step::pack(acc_s[0], p);
      multiply_pv(round);
      if (has_next) {
        sync_group();  // V empty
        if (thread() == 0) copy_v(shared.tile(), key + step);
      }
    }
    softmax.complete_sums();
  }

  // Leaves its part for all to merge.
  CUTE_DEVICE void store_part() {
    sync_group();  // K and V empty
    typename Config::Place const place{thread()};
    CUTE_UNROLL
    for (int d = 0; d < Config::kColumnBlocks; ++d) {
      auto const o = acc_o(_, 0, d);
      shared.buffers[group].part[d][place.thread] = {{o(0), o(1), o(2), o(3)}};
    }
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      if (place.column(0) == 0) shared.rows[group][place.row(i)] = softmax.rows[i];
    }
  }

 private:
  CUTE_DEVICE static int thread() { return opaque(Arch::thread()) % Config::kGroupThreads; }
  CUTE_DEVICE void sync_group() const { Arch::sync(1 + group, Config::kGroupThreads); }
  CUTE_DEVICE int first_key(TileRange const& range) const {
    return range.begin + (params.rank<Arch>() * Config::kGroups + group) * kN;
  }

  CUTE_DEVICE void multiply_qk(int round) {
    Arch::barrier_wait(&shared.k_full[group], round);
    auto const rows = Arch::descriptor(shared.q, 16, 1024);
    auto const tile = Arch::descriptor(shared.buffers[group].k, 16, 1024);
    auto& s = reinterpret_cast<float (&)[kN / 2]>(acc_s[0](0));
    Arch::wgmma_fence(s);
    CUTE_UNROLL
    for (int i = 0; i < Config::kHeadDim / 16; ++i) {
      Arch::template wgmma_ss<Element>(s, rows + column_step<TileQ>(i),
                                       tile + column_step<TileK>(i), i != 0);
    }
    Arch::wgmma_commit();
    Arch::template wgmma_wait<0>(s);
  }

  CUTE_DEVICE void multiply_pv(int round) {
    Arch::barrier_wait(&shared.v_full[group], round);
    auto const tile = Arch::descriptor(shared.buffers[group].v, TileV::kChunkBytes, 1024);
    auto& o = reinterpret_cast<float (&)[Config::kHeadDimV / 2]>(acc_o(0));
    Arch::wgmma_fence(o, p);
    CUTE_UNROLL
    for (int i = 0; i < kN / 16; ++i) {
      Arch::template wgmma_rs<Element>(o, p[i][0], tile + i * 16 * TileV::kRowBytes / 16, true);
    }
    Arch::wgmma_commit();
    Arch::template wgmma_wait<0>(o, p);
  }

  // --- Copies, in one thread ---------------------------------------------------------------------

  CUTE_DEVICE void copy_q(TileCoord const& tile) const {
    Arch::barrier_expect(&shared.q_full, TileQ::kBytes);
    CUTE_UNROLL
    for (int c = 0; c < TileQ::kChunks; ++c) {
      Arch::tma_load(shared.q + c * TileQ::kChunkBytes, params.q, &shared.q_full, c * 64, 0,
                     tile.q_begin, tile.head_q / tile.heads, tile.seq.batch);
    }
  }
  CUTE_DEVICE void copy_k(TileCoord const& tile, int key) const {
    copy<TileK>(params.k, shared.buffers[group].k, &shared.k_full[group], tile, key);
  }
  CUTE_DEVICE void copy_v(TileCoord const& tile, int key) const {
    copy<TileV>(params.v, shared.buffers[group].v, &shared.v_full[group], tile, key);
  }
  template <class Tile>
  CUTE_DEVICE void copy(DenseRows const& from, char* to, arch::Barrier* full, TileCoord const& tile,
                        int key) const {
    Arch::barrier_expect(full, Tile::kBytes);
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      from.load<Arch>(to + c * Tile::kChunkBytes, full, c * 64, key, tile.head_kv,
                      key_rows(tile.seq, params.forward.problem));
    }
  }
};

}  // namespace cutlass_attn::sm90
