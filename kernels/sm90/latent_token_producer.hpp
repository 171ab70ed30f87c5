// The warps that copy the bytes of latent tokens, and convert them to tiles in 16 bits.
#pragma once

#include "latent/tokens.hpp"
#include "sm90/latent_cluster.hpp"

namespace cutlass_attn::sm90 {

// A warp has every fourth unit of 16 tokens, as in LatentProducer. It converts a unit while bytes
// of the other warps' units are in flight. In a cluster it converts half of the rows, so that its
// buffer has room for the bytes of two units: those of the next one are in flight as well.
template <class Config, class Arch>
struct LatentTokenProducer {
  using Shared = typename Config::SharedStorage;
  using Element = typename Config::Element;
  using TileK = typename Config::TileK;
  using Tokens = typename Config::Tokens;
  using Rows = LatentRows<uint8_t, TileK, void, Config::kUnit, Arch>;
  using Numbers = TokenNumbers<Element, Arch>;
  static constexpr TokenFormat kFormat = Config::Stored::kFormat;
  static constexpr int kUnit = Config::kUnit, kUnits = Config::kUnits, kStages = Config::kStages;
  static constexpr int kStep =
      Config::kCopyWarps * kUnit;  // keys from a unit to the warp's next one
  static constexpr int kHalfUnit = TileK::kGroupRows;
  static constexpr int kChunks = kFormat.fp8_columns / 64, kHalf = kChunks / 2;
  static_assert(kFormat.scale_bytes == 4 && kFormat.fp8_columns % 64 == 0);

  typename Config::Params const& params;
  Shared& shared;
  LatentCluster<Config, Arch> const cluster{params, shared};
  int const warp = Arch::uniform(Arch::thread() / 32), lane = Arch::thread() % 32;

  CUTE_DEVICE void run() const {
    Rows rows{
        params.problem,     params.problem.k, params.by_page, lane, 0, shared.addresses[warp], {},
        shared.block.source};
    int32_t const& last = shared.block.last;  // read again: a copy would take a register
    // Bytes are requested one unit ahead, or two in a cluster, before the first unit as well.
    int const ahead = params.cluster * kStep;
    int key = shared.block.first + warp * kUnit;
    rows.look_up_if(key, last);
    CUTE_NO_UNROLL
    for (key -= ahead; key < last; key += kStep) {
      if (key >= shared.block.first) {
        wait_for_bytes();
        {
          Unit const unit = unit_at(key);
          Arch::mbarrier_wait(&shared.k_empty[unit.stage], unit.round ^ 1);
          if (lane == 0) {
            shared.present[unit.stage][unit.in_tile] = shared.started[warp][buffer_at(key)];
          }
          convert(key, unit);
        }
        Unit const unit = unit_at(key);
        cluster.make_visible();  // all lanes have converted; bytes empty
        cluster.pass(unit.stage, unit.in_tile, kHalf, TileK::kChunks - kHalf);
        cluster.arrive(unit.stage, lane);
      }
      start(rows, key + ahead, buffer_at(key));
    }
    Arch::template cp_async_wait_group<0>();
    cluster.leave();
  }

 private:
  // Where a unit goes.
  struct Unit {
    int stage, round, in_tile;
  };
  // Computed again where it is needed, as a ring would take registers.
  CUTE_DEVICE Unit unit_at(int key) const {
    uint32_t const unit = uint32_t(opaque_index(key) - shared.block.first) / kUnit;
    uint32_t const tile = unit / kUnits;
    return {int(tile % kStages), int(tile / kStages % 2), int(unit - tile * kUnits)};
  }
  // The half of the buffer that has the bytes of a unit. They take all of it without a cluster.
  CUTE_DEVICE int buffer_at(int key) const {
    int const half = uint32_t(opaque(key) - shared.block.first) / kStep % 2;
    return cluster.is_shared() ? half : 0;
  }

  // Waits for the oldest bytes.
  CUTE_DEVICE void wait_for_bytes() const {
    if (cluster.is_shared()) {
      Arch::template cp_async_wait_group<1>();
    } else {
      Arch::template cp_async_wait_group<0>();
    }
    Arch::sync_warp();  // the bytes of all lanes have landed
  }

  // Starts the copy of the unit that was looked up, and looks up the next one.
  CUTE_DEVICE void start(Rows& rows, int key, int buffer) const {
    if (key >= shared.block.last) {
      Arch::cp_async_commit_group();  // an empty one, to count
      return;
    }
    rows.place();
    Arch::sync_warp();  // addresses full
    // Each row: 32 vectors, one per lane. Then the remaining kLeft vectors of several rows at once.
    constexpr int kLeft = kFormat.row_bytes / 16 - 32;
    int const lane = opaque_index(this->lane);  // derived values would take registers
    int const count = cluster.count();
    auto const addresses = &shared.addresses[warp][cluster.first()];
    auto const rows_to = &shared.tokens[warp].rows[buffer * kHalfUnit];
    // Copies 16 bytes of a row. A token that is no key becomes zeros.
    auto const copy = [&](int row, int at) {
      uint8_t const* const from = addresses[row];
      Arch::cp_async(Arch::smem_address(&rows_to[row][at]), from + at, from != nullptr);
    };
    CUTE_NO_UNROLL
    for (int first = 0; first < count; first += 4) {
      CUTE_UNROLL
      for (int r = 0; r < 4; ++r) copy(first + r, lane * 16);
    }
    CUTE_NO_UNROLL
    for (int j = lane; j < count * kLeft; j += 32) {
      int const r = j / kLeft;
      copy(r, (32 + j - r * kLeft) * 16);
    }
    Arch::cp_async_commit_group();
    uint32_t const present = rows.present();
    if (lane == 0) shared.started[warp][buffer] = present;
    rows.look_up_if(key + kStep, shared.block.last);
  }

  // Four lanes convert 64 columns of a row. The warp converts eight rows at a time, which lie in
  // different banks. The next columns are read before these are converted, which hides the latency.
  //
  // In a cluster, the first columns are passed on while the others are converted.
  CUTE_DEVICE void convert(int key, Unit const& unit) const {
    auto const bytes_of = &shared.tokens[warp].rows[buffer_at(key) * kHalfUnit];
    auto const to = Arch::smem_address(shared.k[unit.stage]);
    int const begin = unit.in_tile * kUnit + cluster.first();
    int const lane = opaque_index(this->lane);
    CUTE_NO_UNROLL
    for (int r = lane / 4; r < cluster.count(); r += 8) {
      int const column = lane % 4 * 16;
      auto const from = Arch::smem_address(bytes_of[r]);
      auto const low = to + TileK::offset(begin + r, column);
      auto const high = to + TileK::offset(begin + r, column + 8);
      uint32_t scales[4], bytes[2][4];
      static_assert(kFormat.fp8_columns == 4 * kFormat.group);
      Arch::load_shared(from + kFormat.fp8_columns, scales);
      Arch::load_shared(from + column, bytes[0]);
      CUTE_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        if (c + 1 < kChunks) Arch::load_shared(from + (c + 1) * 64 + column, bytes[(c + 1) % 2]);
        float scale;
        __builtin_memcpy(&scale, &scales[c * 64 / kFormat.group], sizeof scale);
        uint32_t words[2][4];
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          Numbers::scaled(bytes[c % 2][i], scale, words[i / 2][i % 2 * 2],
                          words[i / 2][i % 2 * 2 + 1]);
        }
        Arch::store_shared(low + c * TileK::kChunkBytes, words[0]);
        Arch::store_shared(high + c * TileK::kChunkBytes, words[1]);
        if (c + 1 == kHalf && cluster.is_shared()) {
          cluster.make_visible();
          Unit const again = unit_at(key);
          cluster.pass(again.stage, again.in_tile, 0, kHalf);
        }
      }
    }
    // The columns in bf16.
    constexpr int kVectors = (kFormat.columns - kFormat.fp8_columns) / 8;
    CUTE_NO_UNROLL
    for (int i = lane; i < cluster.count() * kVectors; i += 32) {
      int const r = i / kVectors, vector = i % kVectors;
      uint32_t words[4];
      Numbers::bfloats(&bytes_of[r][kFormat.bf16_at + 16 * vector], words);
      Arch::store_shared(to + TileK::offset(begin + r, kFormat.fp8_columns + 8 * vector), words);
    }
  }
};

}  // namespace cutlass_attn::sm90
