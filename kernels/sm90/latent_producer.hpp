// The warps that copy tiles of latents: from a contiguous cache, from pages, or by a list of rows.
#pragma once

#include "sm90/latent_cluster.hpp"

namespace cutlass_attn::sm90 {

// A warp copies every fourth unit of 16 keys, or every second unit of K or of V. It waits for its
// own copies only, so units of four warps are in flight. Then it makes them visible to wgmma. In a
// cluster it copies half of the rows.
template <class Config, class Arch>
struct LatentProducer {
  using Shared = typename Config::SharedStorage;
  using Element = typename Config::Element;
  using TileK = typename Config::TileK;
  using Rows = LatentRows<Element, TileK, void, Config::kUnit, Arch>;
  static constexpr int kUnit = Config::kUnit, kUnits = Config::kUnits, kStages = Config::kStages;

  typename Config::Params const& params;
  Shared& shared;
  LatentCluster<Config, Arch> const cluster{params, shared};
  int const warp = Arch::uniform(Arch::thread() / 32), lane = Arch::thread() % 32;

  CUTE_DEVICE void run() const {
    Problem const& p = params.problem;
    Rows rows{p, operand(), params.by_page, lane, 0, shared.addresses[warp], {}, source()};
    int32_t const& last = shared.block.last;  // read again: a copy would take a register
    int key = shared.block.first + warp % Config::kWarpsOfTile * kUnit, unit = warp;  // of its tile
    Ring<kStages> ring;
    rows.look_up_if(key, last);
    while (key < last) {
      if (unit >= kUnits) {
        unit -= kUnits;
        ring.advance();
        continue;
      }
      Arch::mbarrier_wait(&shared.k_empty[ring.stage], ring.round ^ 1);
      rows.place();
      Arch::sync_warp();  // addresses full
      copy(shared.k[ring.stage], unit, columns());
      Arch::cp_async_commit_group();
      if constexpr (!Config::kHasOwnValues) {
        uint32_t const present = rows.present();
        if (lane == 0) shared.present[ring.stage][unit] = present;
      }
      key += Config::kWarpsOfTile * kUnit;
      rows.look_up_if(key, last);  // while the copies are in flight
      Arch::template cp_async_wait_group<0>();
      cluster.make_visible();  // the copies of all lanes have landed
      cluster.pass(ring.stage, unit, 0, TileK::kChunks);
      cluster.arrive(ring.stage, lane);
      unit += Config::kCopyWarps;
    }
    cluster.leave();
  }

 private:
  CUTE_DEVICE bool is_of_values() const {
    return Config::kHasOwnValues && warp >= Config::kWarpsOfTile;
  }
  CUTE_DEVICE Operand const& operand() const {
    return is_of_values() ? params.problem.v : params.problem.k;
  }
  CUTE_DEVICE typename Config::Source const& source() const {
    if constexpr (Config::kHasOwnValues) {
      if (is_of_values()) return shared.values;
    }
    return shared.block.source;
  }
  CUTE_DEVICE int columns() const {
    return is_of_values() ? params.problem.head_dim_v : params.problem.head_dim;
  }

  // Eight lanes copy 64 columns of a row. Rows that are no keys become zeros.
  CUTE_DEVICE void copy(char* tile, int unit, int columns) const {
    int const column = lane % 8 * 8, first = cluster.first(), end = first + cluster.count();
    CUTE_NO_UNROLL
    for (int r = first + lane / 8; r < end; r += 4) {
      Element const* const from = shared.addresses[warp][r];
      auto const to = Arch::smem_address(tile) + TileK::offset(unit * kUnit + r, column);
      CUTE_UNROLL
      for (int c = 0; c < TileK::kChunks; ++c) {
        Arch::cp_async(to + c * TileK::kChunkBytes, from + c * 64 + column,
                       from && c * 64 + column < columns);
      }
    }
  }
};

}  // namespace cutlass_attn::sm90
