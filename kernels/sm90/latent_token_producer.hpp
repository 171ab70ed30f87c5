// The warps that copy the bytes of latent tokens, and convert them to tiles in 16 bits.
#pragma once

#include "latent/tokens.hpp"
#include "sm90/latent_config.hpp"

namespace cutlass_attn::sm90 {

// A warp has every fourth unit of 16 tokens, as in LatentProducer. It converts a unit while bytes
// of the other warps' units are in flight.
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
  static_assert(kFormat.scale_bytes == 4 && kFormat.fp8_columns % 64 == 0);

  typename Config::Params const& params;
  Shared& shared;
  int const warp = Arch::uniform(Arch::thread() / 32), lane = Arch::thread() % 32;

  CUTE_DEVICE void run() const {
    Tokens& tokens = shared.tokens[warp];
    Rows rows{
        params.problem,     params.problem.k, params.by_page, lane, 0, shared.addresses[warp], {},
        shared.block.source};
    int32_t const& last = shared.block.last;  // read again: a copy would take a register
    int key = shared.block.first + warp * kUnit, unit = warp;  // of its tile
    Ring<kStages> ring;
    rows.look_up_if(key, last);
    uint32_t present = start(rows, key);
    while (key < last) {
      if (unit >= kUnits) {
        unit -= kUnits;
        ring.advance();
        continue;
      }
      Arch::template cp_async_wait_group<0>();
      Arch::sync_warp();  // the bytes of all lanes have landed
      Arch::mbarrier_wait(&shared.k_empty[ring.stage], ring.round ^ 1);
      convert(tokens, shared.k[ring.stage], unit * kUnit);
      if (lane == 0) shared.present[ring.stage][unit] = present;
      Arch::fence_proxy_async();
      Arch::sync_warp();  // all lanes have converted; bytes empty
      if (lane == 0) Arch::mbarrier_arrive(&shared.k_full[ring.stage]);
      key += Config::kCopyWarps * kUnit;
      unit += Config::kCopyWarps;
      present = start(rows, key);
    }
    Arch::template cp_async_wait_group<0>();
  }

 private:
  // Starts the copy of the unit that was looked up, and looks up the next one. Returns a bit mask
  // of the unit's rows: set for keys.
  CUTE_DEVICE uint32_t start(Rows& rows, int key) const {
    if (key >= shared.block.last) return 0;
    rows.place();
    Arch::sync_warp();  // addresses full
    // Each row: 32 vectors, one per lane. Then the remaining kLeft vectors of several rows at once.
    constexpr int kLeft = kFormat.row_bytes / 16 - 32;
    int const lane = opaque_index(this->lane);  // derived values would take registers
#pragma unroll 4
    for (int r = 0; r < kUnit; ++r) copy(r, lane * 16, true);
    CUTE_UNROLL
    for (int i = 0; i < (kUnit * kLeft + 31) / 32; ++i) {
      int const j = i * 32 + lane, r = j / kLeft;
      copy(r % kUnit, (32 + j - r * kLeft) * 16, r < kUnit);
    }
    Arch::cp_async_commit_group();
    uint32_t const present = rows.present();
    rows.look_up_if(key + Config::kCopyWarps * kUnit, shared.block.last);
    return present;
  }

  // Starts the copy of 16 bytes of a row, if in_row. A token that is no key becomes zeros.
  CUTE_DEVICE void copy(int row, int at, bool in_row) const {
    uint8_t const* const from = shared.addresses[warp][row];
    if (!in_row) return;
    Arch::cp_async(Arch::smem_address(&shared.tokens[warp].rows[row][at]), from + at,
                   from != nullptr);
  }

  // Four lanes convert 64 columns of a row. The warp converts eight rows at a time, which lie in
  // different banks. The next columns are read before these are converted, which hides the latency.
  CUTE_DEVICE void convert(Tokens const& tokens, char* tile, int begin) const {
    auto const to = Arch::smem_address(tile);
    int const lane = opaque_index(this->lane);
    CUTE_NO_UNROLL
    for (int r = lane / 4; r < kUnit; r += 8) {
      int const column = lane % 4 * 16;
      auto const from = Arch::smem_address(tokens.rows[r]);
      auto const low = to + TileK::offset(begin + r, column);
      auto const high = to + TileK::offset(begin + r, column + 8);
      constexpr int kChunks = kFormat.fp8_columns / 64;
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
      }
    }
    // The columns in bf16.
    constexpr int kVectors = (kFormat.columns - kFormat.fp8_columns) / 8;
    CUTE_NO_UNROLL
    for (int i = lane; i < kUnit * kVectors; i += 32) {
      int const r = i / kVectors, vector = i % kVectors;
      uint32_t words[4];
      Numbers::bfloats(&tokens.rows[r][kFormat.bf16_at + 16 * vector], words);
      Arch::store_shared(to + TileK::offset(begin + r, kFormat.fp8_columns + 8 * vector), words);
    }
  }
};

}  // namespace cutlass_attn::sm90
