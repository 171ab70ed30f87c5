// Copies tiles of K in int8 with their scales, and of V.
#pragma once

#include "core/quantize.hpp"
#include "sm80/kv_copy.hpp"
#include "sm80/quantized/config.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Arch, class IsAligned, bool kIsReversed>
struct KvCopy<Config, Arch, IsAligned, kIsReversed, int8_t>
    : KvCopy<Config, Arch, IsAligned, kIsReversed, typename Config::Element> {
  using Base = KvCopy<Config, Arch, IsAligned, kIsReversed, typename Config::Element>;
  using Base::Base;
  using Base::copy_v, Base::is_aligned, Base::k_source, Base::k_target, Base::p, Base::shared;
  using Base::thread, Base::v_source;
  using typename Base::CopyK, typename Base::CopyV;

  // As in 16 bits; the scales of the tile are in K's group.
  CUTE_DEVICE void copy_k(int key, int stage) {
    copy_scales(key);
    Base::copy_k(key, stage);
  }

  // This thread's vector of the scales of the tile.
  CUTE_DEVICE char const* scales_source(int key) const {
    auto const* const all = reinterpret_cast<char const*>(shared.block.all_scales);
    unsigned const of_tile = sizeof(shared.block.scales[0]);
    return all + (unsigned(key) / quantize::kTileKeys * of_tile + opaque(thread) * 16);
  }

  // Starts the copies of K, V and scales of a full tile in one group, if `is_there`. The copies are
  // predicated, so that they mix with the following instructions. In a tight tile they are behind a
  // branch: otherwise products wait for their operands (5 % at d128 128x64x4 on an H100).
  CUTE_DEVICE void copy_tile(bool is_there, int key, char const* scales_source, int stage) {
    static_assert(Config::kHasTwo8BitTiles);
    if (!is_aligned) {
      copy_k(key, stage);
      return copy_v(key, stage);
    }
    auto& scales = shared.block.scales[Config::place_of_scales(key)];
    constexpr int kVectors = sizeof(scales) / 16;
    // With fewer columns than kHeadDimV, a copy of V's last row reads beyond its end.
    static_assert(quantize::kReadableBytes >= 2 * (Config::kHeadDimV - 8));
    int const own = opaque(thread);
    auto const copy = [&](bool is_there) {
      if (is_there && own < kVectors) {
        Arch::cp_async(Arch::smem_address(&scales) + own * 16, scales_source, true);
      }
      CopyK::load_next(is_there, k_target + stage * Config::kKStride, k_source,
                       uint32_t(p.k.row_stride));
      CopyV::load_next(is_there, v_target() + stage * Config::kVStride, v_source,
                       uint32_t(p.v.row_stride));
    };
    if constexpr (Config::kIsTight) {
      unpredicated_if(is_there, [&] { copy(true); });
    } else {
      copy(is_there);
    }
    Arch::cp_async_commit_group();
  }

 private:
  using Base::has, Base::seqlen_k, Base::v_target;

  // Starts the copy of the scales of K's tile, in K's group.
  CUTE_DEVICE void copy_scales(int key) const {
    auto& scales = shared.block.scales;
    constexpr int kVectors = sizeof(scales[0]) / 16;
    if (thread >= kVectors || !has(key)) return;
    CUTE_UNROLL
    for (int i = 0; i < Config::kScaleTiles; ++i) {
      unsigned const first = key + i * Config::kScaleKeys;
      if (i > 0 && int(first) >= seqlen_k()) return;
      auto const* const all = shared.block.all_scales + first / quantize::kTileKeys;
      auto* const to = &scales[Config::place_of_scales(int(first))];
      copy_vector(reinterpret_cast<float*>(to) + thread * 4,
                  reinterpret_cast<float const*>(all) + thread * 4);
    }
  }
  CUTE_DEVICE void copy_vector(float* to, float const* from) const {
    if (is_aligned) {
      Arch::cp_async(Arch::smem_address(to), from, true);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) to[i] = from[i];
    }
  }
};

}  // namespace cutlass_attn::sm80
