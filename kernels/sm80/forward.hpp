// Forward attention on mma.sync (sm_80 and later; what Ada runs).
//
// Grid:       a block for every kBlockM rows of a head, or of the heads of one KV head together
//             where there are fewer queries than that (core/scheduler.hpp).
// Block:      kWarps warps below each other, or as many times kColumnWarps; tiles of kBlockN keys
//             one after the other.
// Warp:       kBlockM / kWarps rows, all keys of a tile, the whole head dimension; where several
//             warps share the rows, a share of the keys for S, and of the head dimension for O.
// Sums:       in fp32. With QkAccumulator = half_t those of Q K^T are in fp16; with PvAccumulator =
//             half_t those of P V over a slice of keys are, and the slices are added up in fp32.
// Registers:  S of a slice of keys or of a tile, P of a slice, O, softmax state of the rows; Q
//             where it has room.
// Shared:     Q, and K and V tiles, swizzled (swizzle.hpp); filled by cp.async, read by ldmatrix.
// Pipeline:   see mainloop_forward.hpp and what it names.
#pragma once

#include <type_traits>

#include "core/params.hpp"
#include "sm80/mainloop_forward.hpp"

namespace cutlass_attn::sm80 {

template <class Element, int kHeadDim, int kHeadDimV, int kBlockM_, int kBlockN, int kWarps,
          int kColumnWarps = 1, class QkAccumulator = float, class PvAccumulator = float>
struct Forward {
  using Config = std::conditional_t<
      kColumnWarps == 1,
      ForwardConfig<Element, kHeadDim, kHeadDimV, kBlockM_, kBlockN, kWarps, QkAccumulator,
                    PvAccumulator>,
      SplitConfig<Element, kHeadDim, kHeadDimV, kBlockM_, kBlockN, kWarps, kColumnWarps>>;
  static_assert(std::is_same_v<QkAccumulator, typename Config::QkAccumulator> &&
                    std::is_same_v<PvAccumulator, typename Config::PvAccumulator>,
                "the split schedule adds up in fp32 alone");
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kSmemBytes = sizeof(typename Config::SharedStorage);
  static constexpr int kMinBlocksPerSm = Config::kMinBlocksPerSm;

  static constexpr bool kPacksHeads = true;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(AttnParams const& p, TileScheduler const& scheduler, char* smem) {
    auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(smem);
    TileCoord const coord(scheduler, kBlockM, Arch::block());
    IntervalMask const mask(p);
    TileRange const tiles = mask.tiles(coord.q_begin, coord.q_end, kBlockN).in_keys(kBlockN);
    if (Arch::thread() == 0) {
      shared.tile = coord;
      shared.range = tiles;
      shared.mask = mask.near(coord.q_begin);
      if constexpr (Score::kIsGeneral) shared.dropout = Dropout(p);
    }
    MainloopForward<Config, Score, Arch> loop(p, coord, tiles, shared);
    loop.run(coord, tiles);

    finish_rows(p, shared.tile, loop);
    Arch::sync();  // Q, K and V are read by none any more
    stage_output(loop, smem);
    Arch::sync();
    TileLoader<Arch, Element, typename Config::TileO, kThreads>::store_output(
        smem, p, shared.tile, loop.is_aligned, loop.thread);
  }

 private:
  // Takes in the sinks, writes LSE and normalises O.
  template <class Loop>
  CUTE_DEVICE static void finish_rows(AttnParams const& p, TileCoord const& tile, Loop& loop) {
    Tensor o_rows = as_rows(loop.acc_o);  // (row, column)
    SoftmaxRow(&rows)[Loop::kRows] = loop.softmax.rows;
    if (p.sinks) {
      CUTE_UNROLL
      for (int i = 0; i < Loop::kRows; ++i) {
        if (loop.row(i) >= tile.rows) continue;
        float const factor = rows[i].add_logit(p.sinks[tile.head(loop.row(i))], 1.0f);
        loop.softmax.scale(o_rows, i, factor);
      }
    }
    // One of the threads that share a row.
    if (p.softmax_lse && loop.column(0) == 0 && loop.column_warp() == 0) {
      CUTE_UNROLL
      for (int i = 0; i < Loop::kRows; ++i) {
        if (loop.row(i) < tile.rows) p.softmax_lse[tile.lse_of(p, loop.row(i))] = rows[i].lse(1.0f);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < Loop::kRows; ++i) loop.softmax.scale(o_rows, i, rows[i].inverse_sum());
  }

  // Writes O, rounded, to where Q was.
  template <class Loop>
  CUTE_DEVICE static void stage_output(Loop& loop, char* smem) {
    Tensor o = convert_to<Element>(loop.acc_o);
    Tensor words = as_rows(recast<uint32_t>(o));  // (row, pair of columns)
    int const column = loop.column_warp() * Config::kWarpColumns;
    int const first =
        Config::TileO::offset(loop.row(0), column) + loop.column(0) * int(sizeof(Element));
    CUTE_UNROLL
    for (int i = 0; i < size<0>(words); ++i) {
      CUTE_UNROLL
      for (int n = 0; n < size<1>(words); ++n) {
        int const row = i % 2 + i / 2 * (2 * Config::kWarps);  // of 8 x 8 blocks
        *reinterpret_cast<uint32_t*>(smem + Config::TileO::block8(first, row, n)) = words(i, n);
      }
    }
  }
};

}  // namespace cutlass_attn::sm80
