// The warps that copy tiles of latents: from a contiguous cache, from pages, or by a list of rows.
#pragma once

#include "sm90/latent_cluster.hpp"

namespace cutlass_attn::sm90 {

// A warp copies every fourth unit of 16 keys, or every second unit of K or of V. It waits for its
// own copies only, so units of four warps are in flight. Then it makes them visible to wgmma.
//
// In a cluster, each block copies half of the rows of a unit to both blocks. If all of its keys
// exist, TMA does that, and the warp goes on while stages are free. It does so in a block alone,
// too, that copies K and V: 934 us instead of 1219 for 4 x 4032 keys of 4 heads. Not for latents:
// of 128 x 4096 keys, 128 heads gain (264 us, 272 before) and 16 heads lose (166, 156 before; H200,
// bf16).
template <class Config, class Arch>
struct LatentProducer {
  using Shared = typename Config::SharedStorage;
  using Element = typename Config::Element;
  using TileK = typename Config::TileK;
  using Rows = LatentRows<Element, TileK, void, Config::kUnit, Arch>;
  static constexpr int kUnit = Config::kUnit, kUnits = Config::kUnits, kStages = Config::kStages;
  static_assert(kUnit == LatentBoxes::kUnit && TileK::kGroupRows == LatentBoxes::kRows);

  typename Config::Params const& params;
  Shared& shared;
  LatentCluster<Config, Arch> const cluster{params, shared};
  int const warp = Arch::uniform(Arch::thread() / 32), lane = Arch::thread() % 32;

  CUTE_DEVICE void run() const {
    Problem const& p = params.problem;
    Rows rows{p, operand(), params.by_page, lane, 0, shared.addresses[warp], {}, source()};
    Box box = {};
    int32_t const& last = shared.block.last;  // read again: a copy would take a register
    int key = shared.block.first + warp % Config::kWarpsOfTile * kUnit, unit = warp;  // of its tile
    // Before the unit is copied, as its page number is in global memory.
    auto const look_up = [&](int key) {
      if (key >= last) return;
      if (is_box(key)) {
        box = box_at(key);
      } else {
        rows.look_up(key);
      }
    };
    [[maybe_unused]] int const second = shared.block.first + Config::kBlockN;  // tile
    Ring<kStages> ring;
    look_up(key);
    while (key < last) {
      if (unit >= kUnits) {
        unit -= kUnits;
        ring.advance();
        continue;
      }
      if constexpr (!Config::kHasOwnValues) {
        // Q first: the first product needs it and no second tile.
        if (key >= second) Arch::mbarrier_wait(&shared.q_full, 0);
      }
      Arch::mbarrier_wait(&shared.k_empty[ring.stage], ring.round ^ 1);
      int const next = key + Config::kWarpsOfTile * kUnit;
      if (is_box(key)) {
        copy(box, ring.stage, unit);
        look_up(next);
      } else {
        rows.place();
        Arch::sync_warp();  // addresses full
        copy(shared.k[ring.stage], unit, columns());
        Arch::cp_async_commit_group();
        if constexpr (!Config::kHasOwnValues) {
          uint32_t const present = rows.present();
          if (lane == 0) shared.present[ring.stage][unit] = present;
        }
        look_up(next);  // while the copies are in flight
        Arch::template cp_async_wait_group<0>();
        cluster.make_visible();  // the copies of all lanes have landed
        cluster.pass(ring.stage, unit, 0, TileK::kChunks);
        cluster.arrive(ring.stage, lane);
      }
      key = next;
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
  CUTE_DEVICE LatentBoxes const& boxes() const {
    return is_of_values() ? params.v_boxes : params.k_boxes;
  }

  // Whether TMA copies the unit at `key`: a box has all columns of a tile, and would bring in rows
  // that are no keys, which may be NaN.
  CUTE_DEVICE bool is_box(int key) const {
    KeyRange const& keys = source().keys;
    return (Config::kHasOwnValues || cluster.is_shared()) && boxes().exist &&
           columns() == TileK::kColumns && key >= keys.first && key + kUnit <= keys.end;
  }

  // First row of a unit, in its page or batch entry.
  struct Box {
    int row, entry;
  };
  CUTE_DEVICE Box box_at(int key) const {
    Problem const& p = params.problem;
    auto const& seq = shared.block.tile.seq;
    if (!p.kv.has_pages()) return {seq.first_k + key, p.seq_k.cu_seqlens ? 0 : seq.batch};
    int const page = params.by_page(key);
    return {key - page * p.kv.page_size, source().pages[page]};
  }

  // Copies this block's half of a unit to both blocks, of which each receives the other half as
  // well. A block alone copies both halves.
  CUTE_DEVICE void copy(Box const& box, int stage, int unit) const {
    if (!Arch::elect()) return;
    auto* const full = &shared.k_full[stage];
    Arch::mbarrier_arrive_expect_tx(full, kUnit / TileK::kGroupRows * TileK::kGroupBytes);
    auto const target = [&](int of_unit) {
      return shared.k[stage] + TileK::offset(unit * kUnit + of_unit, 0);
    };
    TensorMap const& map = boxes().map;
    int const first = cluster.first(), head = shared.block.tile.head_kv;
    if (!Config::kHasOwnValues || cluster.is_shared()) {
      Arch::tma_load_multicast(target(first), map, full, 0b11, 0, box.row + first, 0, box.entry,
                               head);
      return;
    }
    for (int row = 0; row < kUnit; row += TileK::kGroupRows) {
      Arch::tma_load(target(row), map, full, 0, box.row + row, 0, box.entry, head);
    }
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
