// Q of a tile of rows. Its first chunks of 64 columns stay in registers of the scores' warpgroup:
// shared memory has no room for all of Q beside the tiles, nor the bandwidth to read all of Q for
// each tile.
#pragma once

#include "sm90/latent_config.hpp"

namespace cutlass_attn::sm90 {

// The output warpgroups, which have nothing to do before the first P, copy the other chunks to
// shared memory, while the scores' warpgroup loads its own: one latency instead of two.
template <class Config, class Arch>
struct LatentQueries {
  using Shared = typename Config::SharedStorage;
  using Element = typename Config::Element;
  using TileQ = typename Config::TileQ;
  static constexpr int kCopyThreads = Config::kOutputGroups * Config::kGroupThreads;
  static constexpr int kKeptSteps = Config::kKeptChunks * 4;  // of 16 columns

  Problem const& p;
  Shared& shared;

  // In the output warpgroups.
  CUTE_DEVICE void copy() const {
    int const thread = Arch::thread() - (Config::kThreads - kCopyThreads);
    int const vector = thread % 8 * 8;
    CUTE_UNROLL
    for (int i = 0; i < Config::kBlockM * 8 / kCopyThreads; ++i) {
      int const row = (i * kCopyThreads + thread) / 8;
      auto const from = row_of(row);
      CUTE_UNROLL
      for (int c = 0; c < TileQ::kChunks; ++c) {
        int const column = (Config::kKeptChunks + c) * 64 + vector;
        Arch::cp_async(Arch::smem_address(shared.q) + TileQ::offset(row, c * 64 + vector),
                       from + column, is_row(row) && column < p.head_dim);
      }
    }
    Arch::cp_async_commit_group();
    Arch::template cp_async_wait_group<0>();
    Arch::fence_proxy_async();
    Arch::sync_warp();  // the copies of all lanes have landed
    if (thread % 32 == 0) Arch::mbarrier_arrive(&shared.q_full);
  }

  // In the scores' warpgroup: the chunks that stay in registers, as the A operand of wgmma. Returns
  // when the other chunks are in shared memory.
  CUTE_DEVICE void load(uint32_t (&q)[kKeptSteps][4]) const {
    typename Config::Place const place{Arch::thread() % Config::kGroupThreads};
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      int const row = place.row(i);
      auto const from = row_of(row) + place.column(0);
      CUTE_UNROLL
      for (int n = 0; n < 2 * kKeptSteps; ++n) {
        q[n / 2][i + n % 2 * 2] = is_row(row) && n * 8 < p.head_dim
                                      ? *reinterpret_cast<uint32_t const*>(from + n * 8)
                                      : 0;
      }
    }
    Arch::mbarrier_wait(&shared.q_full, 0);
  }

 private:
  CUTE_DEVICE bool is_row(int row) const { return row < shared.block.tile.rows; }
  CUTE_DEVICE Element const* row_of(int row) const {
    return shared.block.tile.template row_of<Element const>(p.q, is_row(row) ? row : 0);
  }
};

}  // namespace cutlass_attn::sm90
