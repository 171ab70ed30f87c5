// Forward attention on mma.sync (sm_80 and later; what Ada runs).
//
// Grid:       a block for every kBlockM rows of a head, or of the heads of one KV head together
//             where there are fewer queries than that (cute/scheduler.hpp).
// Block:      kKeyGroups groups of kWarps warps. Each group takes every kKeyGroups-th tile of
//             kBlockN keys, with K and V buffers of its own; in the end their results are merged.
//             Or kWarps x kColumnWarps warps, all for the same tiles.
// Warp:       kBlockM / kWarps rows, all keys of a tile, the whole head dimension; with
//             kColumnWarps, a share of the keys for S, and of the head dimension for O.
// Registers:  S of a slice of 16 keys or of a tile, P of a slice, O, softmax state of the rows; Q
//             where it has room.
// Shared:     Q, and K and V tiles, swizzled (swizzle.hpp); filled by cp.async, read by ldmatrix.
// Pipeline:   see mainloop_forward.hpp.
#pragma once

#include <type_traits>

#include "core/params.hpp"
#include "cute/epilogue.hpp"
#include "sm80/mainloop_forward.hpp"
#include "sm80/merge.hpp"

namespace cutlass_attn::sm80 {

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kWarps,
          int kKeyGroups, int kColumnWarps = 1>
struct Forward {
  static_assert(kKeyGroups == 1 || kColumnWarps == 1);
  using Config = std::conditional_t<
      kColumnWarps == 1,
      ForwardConfig<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps, kKeyGroups>,
      SplitConfig<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps, kColumnWarps>>;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kSmemBytes = sizeof(typename Config::SharedStorage);
  static constexpr int kMinBlocksPerSm = Config::kMinBlocksPerSm;

  static int64_t blocks(AttnParams const& p) {
    return num_tiles(p, kBlockM, heads_per_tile(p, kBlockM));
  }

  template <class Score, class Arch>
  CUTE_DEVICE static void run(AttnParams const& p, char* smem) {
    auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(smem);
    TileCoord const& tile = shared.tile;
    if (Arch::thread() == 0) {
      shared.tile = TileCoord(p, kBlockM, Arch::block(), heads_per_tile(p, kBlockM));
      shared.mask = IntervalMask(p);
      shared.k = tile.template head_of<Element const>(p.k, tile.head_kv);
      shared.v = tile.template head_of<Element const>(p.v, tile.head_kv);
      TileRange const tiles = shared.mask.tiles(tile.q_begin, tile.q_end, kBlockN);
      shared.range = {tiles.begin * kBlockN, tiles.end * kBlockN, tiles.full_begin * kBlockN,
                      tiles.full_end * kBlockN};
    }
    Arch::sync();
    MainloopForward<Config, Score, Arch> loop(p, shared);
    loop.run();

    if constexpr (kKeyGroups > 1) merge_key_groups<Config, Arch>(loop, smem);
    if constexpr (kColumnWarps > 1) merge_sums<Config, Arch>(loop, smem);
    if (kKeyGroups == 1 || loop.group == 0) {
      Tensor o_rows = as_rows(loop.acc_o);  // (row, column)
      CUTE_UNROLL
      for (int i = 0; i < loop.kRows; ++i) finish_row(p, tile, loop, o_rows, i);
    }
    Arch::sync();  // Q, K, V or what the groups exchanged: read by none any more
    if (kKeyGroups == 1 || loop.group == 0) stage_output(loop, smem);
    Arch::sync();
    store_rows<Arch, typename Config::TileO, Element, kBlockM, kThreads>(p, tile, smem);
  }

 private:
  // Takes in the sink, normalises row i of O and writes its LSE: of the threads that share the row,
  // the one that holds column 0.
  template <class Loop, class Rows>
  CUTE_DEVICE static void finish_row(AttnParams const& p, TileCoord const& tile, Loop& loop,
                                     Rows& o_rows, int i) {
    int const row = loop.row(i);
    bool const inside = row < tile.rows;
    SoftmaxRow& state = loop.softmax.rows[i];
    float factor = 1.0f;
    if (p.sinks && inside) factor = state.add_logit(p.sinks[tile.head(row)], 1.0f);
    loop.softmax.scale(o_rows, i, factor * state.inverse_sum());
    if (p.softmax_lse && inside && loop.column(0) == 0 && loop.column_warp() == 0) {
      p.softmax_lse[tile.lse_of(p, row)] = state.lse(1.0f);
    }
  }

  // Writes O, rounded, to where Q was.
  template <class Loop>
  CUTE_DEVICE static void stage_output(Loop& loop, char* smem) {
    Tensor o = convert_to<Element>(loop.acc_o);
    Tensor words = as_rows(recast<uint32_t>(o));  // (row, pair of columns)
    CUTE_UNROLL
    for (int i = 0; i < size<0>(words); ++i) {
      CUTE_UNROLL
      for (int n = 0; n < size<1>(words); ++n) {
        int const offset =
            Config::TileO::offset(loop.row(i), loop.column_warp() * size<1>(words) * 8 + 8 * n);
        *reinterpret_cast<uint32_t*>(smem + offset + loop.column(0) * int(sizeof(Element))) =
            words(i, n);
      }
    }
  }
};

}  // namespace cutlass_attn::sm80
