// Shared by the backward kernels on mma.sync and on wgmma: the tile of keys of a block, the queries
// that see its keys, and how dK and dV are stored.
//
// A Config has kHeadDim, kBlockN keys per block, and kWarpsN warps with kWarpKeys keys each, in
// kKeyBlocks m16 blocks.
#pragma once

#include "core/dropout.hpp"
#include "core/mask.hpp"
#include "core/opaque.hpp"
#include "tile/backward_params.hpp"
#include "tile/quad_rows.hpp"

namespace cutlass_attn {

// Queries that see keys of a warp: [some_begin, some_end) see at least one key, [all_begin,
// all_end) see all keys. A range is empty if begin >= end.
struct alignas(16) VisibleQueries {
  int32_t some_begin, some_end, all_begin, all_end;
};

// In shared memory, because the loop has no registers for it.
template <class SeqInfo, int kWarpsN>
struct BackwardBlock {
  SeqInfo seq;      // batch entry
  RowTile tile;     // of keys
  int32_t ticket;   // if dQ is added in order: number of blocks that began before this one
  TileRange range;  // tiles of queries that see any key of this tile
  DropoutMask dropout;
  VisibleQueries visible[kWarpsN];
};

// Index of a block's tile of keys. block: index among the blocks with a tile. If dQ is added in
// order, blocks wait for blocks of earlier keys. Tiles are therefore assigned in the order in which
// blocks begin, so that a block only waits for blocks that have begun. Called by all threads of the
// block. ticket: in shared memory.
template <class Config, class Arch>
CUTE_DEVICE int number_of_tile(MmaBackwardParams const& params, int block, int32_t& ticket) {
  if constexpr (!Config::kIsOrdered) {
    return params.tile_of_block(block);
  } else {
    if (Arch::thread() == 0) ticket = Arch::atom_add(params.tickets(), 1);
    Arch::sync();  // ticket full
    return params.tile_of(ticket);
  }
}

// Finds the queries that see each key, and the queries that see the keys of each warp. Called by
// the first `threads` threads of the block.
template <class Config, class Arch>
CUTE_DEVICE void share_visible(IntervalMask const& mask, int first_key, int threads,
                               VisibleQueries (&visible_of_warp)[Config::kWarpsN],
                               int32_t (&queries_of_key)[Config::kBlockN][2]) {
  int const thread = Arch::thread();
  CUTE_NO_UNROLL
  for (int i = thread; i < Config::kBlockN; i += threads) {
    int const key = first_key + i;
    bool const is_key = key < mask.seqlen_k;
    queries_of_key[i][0] = is_key ? mask.q_lo(key) : 0;
    queries_of_key[i][1] = is_key ? mask.q_hi(key) : 0;
  }
  if (thread < Config::kWarpsN) {
    int const first = first_key + thread * Config::kWarpKeys;
    int last = first + Config::kWarpKeys - 1;
    bool const is_whole = last < mask.seqlen_k;
    if (!is_whole) last = mask.seqlen_k - 1;
    VisibleQueries visible = {0, 0, 0, 0};
    if (first <= last) visible = {mask.q_lo(first), mask.q_hi(last), mask.q_lo(last), 0};
    if (is_whole) visible.all_end = mask.q_hi(first);
    visible_of_warp[thread] = visible;
  }
}

// Rounds and stores dK or dV. `thread`: index among the threads that compute; first_block: index of
// the first 8 columns of `grad` in the head dim.
template <class Config, class Arch, class Block, class Grad>
CUTE_DEVICE void store_grad(Operand const& to, int columns, float scale, Block const& block,
                            Problem const& p, Grad const& grad, int thread, int first_block = 0) {
  using Element = typename Config::Element;
  if (to.data == nullptr) return;
  int const lane = thread % 32;
  int const first_row = thread / 32 % Config::kWarpsN * Config::kWarpKeys + lane / 4;
  int const keys = block.seq.lens(p).k - block.tile.begin;
  Element* target = block.seq.template keys<Element>(to, block.tile.head) +
                    int64_t(block.tile.begin + first_row) * to.row_stride;
  CUTE_UNROLL
  for (int m = 0; m < Config::kKeyBlocks; ++m) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int first = 0; first < Grad::kN; first += 4) {
        uint32_t words[4];
        CUTE_UNROLL
        for (int n = 0; n < 4; ++n) {
          words[n] = Arch::template pack<Element>(grad(2 * half, m, first + n) * scale,
                                                  grad(2 * half + 1, m, first + n) * scale);
        }
        store_columns<Arch>(target, words, first_block + first, columns,
                            first_row + m * 16 + half * 8 < keys, lane);
      }
      target += 8 * to.row_stride;
    }
  }
}

}  // namespace cutlass_attn
