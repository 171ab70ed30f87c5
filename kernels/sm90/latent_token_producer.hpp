// The warps that copy the bytes of latent tokens, and convert them to tiles in 16 bits.
#pragma once

#include "sm80/latent_tokens.hpp"
#include "sm90/latent_config.hpp"

namespace cutlass_attn::sm90 {

// A warp has every fourth unit of 16 tokens, as in LatentProducer. It converts one while the bytes
// of other warps' units are in flight.
template <class Config, class Arch>
struct LatentTokenProducer {
  using Shared = typename Config::SharedStorage;
  using Element = typename Config::Element;
  using TileK = typename Config::TileK;
  using Tokens = typename Config::Tokens;
  using Rows = sm80::LatentRows<uint8_t, TileK, void, Config::kUnit, Arch>;
  using Numbers = sm80::TokenNumbers<Element, Arch>;
  static constexpr TokenFormat kFormat = Config::Stored::kFormat;
  static constexpr int kUnit = Config::kUnit, kUnits = Config::kUnits, kStages = Config::kStages;
  static_assert(kFormat.scale_bytes == 4 && kFormat.fp8_columns % 64 == 0);

  typename Config::Params const& params;
  Shared& shared;
  int const warp = Arch::uniform(Arch::thread() / 32), lane = Arch::thread() % 32;

  CUTE_DEVICE void run() const {
    Tokens& tokens = shared.tokens[warp];
    Rows rows{params.problem,     params.by_page, lane, 0, shared.addresses[warp], {},
              shared.block.source};
    int32_t const& last = shared.block.last;                   // read again, as registers are few
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
  // Starts the copy of the unit that was looked up, and looks up the next one. Returns which of its
  // rows are keys.
  CUTE_DEVICE uint32_t start(Rows& rows, int key) const {
    if (key >= shared.block.last) return 0;
    rows.place();
    Arch::sync_warp();  // addresses full
    constexpr int kVectors = kFormat.row_bytes / 16;
    CUTE_NO_UNROLL
    for (int i = lane; i < kUnit * kVectors; i += 32) {
      int const r = i / kVectors, at = (i - r * kVectors) * 16;
      uint8_t const* const from = shared.addresses[warp][r];
      Arch::cp_async(Arch::smem_address(&shared.tokens[warp].rows[r][at]), from + at,
                     from != nullptr);
    }
    Arch::cp_async_commit_group();
    uint32_t const present = rows.present();
    rows.look_up_if(key + Config::kCopyWarps * kUnit, shared.block.last);
    return present;
  }

  // Four lanes convert 64 columns of a row, and eight rows at once go to different banks.
  CUTE_DEVICE void convert(Tokens const& tokens, char* tile, int begin) const {
    auto const to = Arch::smem_address(tile);
    CUTE_NO_UNROLL
    for (int r = lane / 4; r < kUnit; r += 8) {
      int const column = lane % 4 * 16;
      auto const from = Arch::smem_address(tokens.rows[r]);
      auto const low = to + TileK::offset(begin + r, column);
      auto const high = to + TileK::offset(begin + r, column + 8);
      CUTE_UNROLL
      for (int c = 0; c < kFormat.fp8_columns / 64; ++c) {
        uint32_t bytes[4], words[4];
        Arch::load_shared(from + c * 64 + column, bytes);
        float const scale = *reinterpret_cast<float const*>(
            &tokens.rows[r][kFormat.fp8_columns + c * 64 / kFormat.group * 4]);
        Numbers::scaled(bytes[0], scale, words[0], words[1]);
        Numbers::scaled(bytes[1], scale, words[2], words[3]);
        Arch::store_shared(low + c * TileK::kChunkBytes, words);
        Numbers::scaled(bytes[2], scale, words[0], words[1]);
        Numbers::scaled(bytes[3], scale, words[2], words[3]);
        Arch::store_shared(high + c * TileK::kChunkBytes, words);
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
