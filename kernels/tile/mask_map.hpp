// Makes the mask map (core/mask_map.hpp) of a call, in a launch before the kernel that reads it.
//
// Grid:    for each tile of rows, one block per 8 key tiles: one byte of a MaskWord
// Block:   one warp per key tile
// Thread:  16 keys of a row at a time, in one load if rows are aligned and the tile is not cut off.
//          Four or eight neighbouring lanes share a row
// Shared:  the words of each warp's key tile, until it is known whether the tile is partial
#pragma once

#include <cute/config.hpp>

#include "core/masked_params.hpp"
#include "core/vector.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn {

// Params: MaskedParams.
template <class Params_, int kBlockM, int kBlockN>
struct MakeMaskMap {
  using Params = Params_;
  static constexpr int kWarps = 8;  // bits of a byte
  static constexpr int kThreads = kWarps * 32;
  static_assert(kThreads == MaskMap::kThreads);
  static constexpr int kKeys = 16;  // per load
  static constexpr int kLoads = kBlockN / kKeys;
  static constexpr int kLanes = kLoads > 4 ? 8 : 4;  // lanes that share a row
  static constexpr int kRows = 32 / kLanes;          // rows of a warp per load
  static constexpr int kBatch = kBlockM / kRows < 8 ? kBlockM / kRows : 8;  // loads issued together
  static constexpr int kTileWords = kBlockM * MaskMap::kLanes;
  static constexpr int kSmemBytes = MaskMap::smem_bytes(kBlockM);
  // Word of a row that sees every key, for the columns of one lane of a quad.
  static constexpr uint32_t kAll = kBlockN == 128 ? ~0u : (1u << kBlockN / 4 % 32) - 1;
  static_assert(kBlockN % kKeys == 0 && kBlockN <= 128 && kBlockM % (kBatch * kRows) == 0);

  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    MaskMap const& map = params.map;
    int const bytes = map.num_words * 4, warp = Arch::thread() / 32;
    int const row = Arch::block() / bytes, byte = Arch::block() - row * bytes;
    int const key_tile = byte * kWarps + warp;
    Class found = {};
    if (key_tile < map.key_tiles) {
      auto* const words = reinterpret_cast<uint32_t*>(smem) + warp * kTileWords;
      found = Rows<Arch>(map, params.dense(), row).classify(map.bits_of(row), key_tile, words);
    }
    auto* const of_warps = reinterpret_cast<Class*>(smem) + kWarps * kTileWords;
    if (Arch::thread() % 32 == 0) of_warps[warp] = found;
    Arch::sync();
    if (Arch::thread() != 0) return;
    uint32_t any = 0, all = 0;
    for (int i = 0; i < kWarps; ++i) {
      any |= uint32_t(of_warps[i].any) << i;
      all |= uint32_t(of_warps[i].all) << i;
    }
    MaskWord& word = map.words_of(row)[byte / 4];
    reinterpret_cast<uint8_t*>(&word.any)[byte % 4] = uint8_t(any);
    reinterpret_cast<uint8_t*>(&word.all)[byte % 4] = uint8_t(all);
  }

 private:
  struct Class {
    uint16_t any, all;  // whether any row sees any key of a tile; whether every row sees every key
  };
  static_assert(sizeof(Class) == sizeof(uint32_t));

  // A lane's part of a tile of rows.
  template <class Arch>
  struct Rows {
    PerLogit const& mask;
    TileCoord tile;
    TileRange range;
    TileMask interval;
    int seqlen_k;
    bool is_aligned;

    CUTE_DEVICE Rows(MaskMap const& map, ForwardParams const& dense, int64_t row)
        : mask(dense.problem.mask.elements),
          tile(map.tile_of(row, dense.problem, dense.scheduler)) {
      SeqLens const lens = tile.seq.lens(dense.problem);
      IntervalMask const of_call = dense.template mask<true>(lens);
      range = of_call.tiles(tile.q_begin, tile.q_end, kBlockN);
      interval = of_call.tile_mask(tile.q_begin);
      seqlen_k = lens.k;
      uint64_t const bits = reinterpret_cast<uint64_t>(mask.data) |
                            uint64_t(mask.batch_stride | mask.head_stride | mask.row_stride);
      is_aligned = mask.key_stride == 1 && bits % kKeys == 0;
    }

    // words: scratch of the warp in shared memory.
    CUTE_DEVICE Class classify(uint32_t* bits, int key_tile, uint32_t* words) const {
      if (key_tile < range.begin || key_tile >= range.end) return {0, 0};
      bits += int64_t(key_tile) * kTileWords;
      int const key = key_tile * kBlockN;
      return is_aligned && key + kBlockN <= seqlen_k ? classify<true>(bits, key, words)
                                                     : classify<false>(bits, key, words);
    }

   private:
    // kIsVector: each load is one of 16 bytes.
    template <bool kIsVector>
    CUTE_DEVICE Class classify(uint32_t* bits, int key, uint32_t* words) const {
      int const lane = Arch::thread() % 32, at = lane % kLanes;
      bool const is_inside = range.is_full(key / kBlockN);
      bool any = false, all = true;
      CUTE_NO_UNROLL
      for (int first = lane / kLanes; first < kBlockM; first += kBatch * kRows) {
        uint32_t loaded[kBatch][4];
        CUTE_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          load<kIsVector>(first + i * kRows, key + at * kKeys, loaded[i]);
        }
        CUTE_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          int const row = first + i * kRows;
          uint32_t word = gather(loaded[i], at) & kAll;
          if (!is_inside) word &= within_interval(row, key, lane);
          bool const is_there = row < tile.rows;
          any = any || (word != 0 && is_there);
          all = all && (word == kAll || !is_there);
          if (at < MaskMap::kLanes) words[row * MaskMap::kLanes + at] = word;
        }
      }
      any = Arch::any(any);
      all = any && !Arch::any(!all);
      if (any && !all) {
        Arch::sync_warp();
        CUTE_UNROLL
        for (int i = 0; i < kTileWords / 32; ++i) bits[i * 32 + lane] = words[i * 32 + lane];
      }
      return {uint16_t(any), uint16_t(all)};
    }

    // Bits of the lane's columns whose keys are in the row's interval.
    CUTE_DEVICE uint32_t within_interval(int row, int key, int lane) const {
      int const q = tile.query(row) - tile.q_begin;
      FragmentPlace<1, 1> const place{lane};
      return place.columns_before(interval.hi(q) - key) &
             ~place.columns_before(interval.lo(q) - key);
    }

    // 16 keys of a row from `key` on, four in a word; 0 where no key exists. Arbitrary for rows
    // beyond the last.
    template <bool kIsVector>
    CUTE_DEVICE void load(int row, int key, uint32_t (&words)[4]) const {
      // Rows and loads out of range are replaced by valid ones: in a branch, each load would be
      // waited for before the next.
      row = row < tile.rows ? row : tile.rows - 1;
      bool const is_load = kLoads % kLanes == 0 || Arch::thread() % kLanes < kLoads;
      if (!is_load) key -= kLanes / 2 * kKeys;
      auto const* const from = static_cast<uint8_t const*>(mask.data) +
                               tile.seq.batch * mask.batch_stride +
                               tile.head(row) * mask.head_stride +
                               tile.query(row) * mask.row_stride + key * mask.key_stride;
      if constexpr (kIsVector) {
        auto const vector = *reinterpret_cast<Vector16 const*>(from);
        __builtin_memcpy(words, &vector, sizeof vector);
      } else {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) words[i] = 0;
        CUTE_UNROLL
        for (int i = 0; i < kKeys; ++i) {
          if (key + i < seqlen_k) words[i / 4] |= uint32_t(from[i * mask.key_stride]) << i % 4 * 8;
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) words[i] = is_load ? words[i] : 0;
    }

    // The word of the row for lane `at` % 4 of a quad, from the 16 bytes that each lane of the row
    // holds.
    CUTE_DEVICE static uint32_t gather(uint32_t const (&bytes)[4], int at) {
      uint32_t words[4];  // by lane of a quad: keys 2 lane and 2 lane + 1 of each eight
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) words[i] = 0;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t const pairs = pairs_of(bytes[i]);
        words[i % 2 * 2] |= (pairs & 3) << (at * 4 + i / 2 * 2);
        words[i % 2 * 2 + 1] |= (pairs >> 16 & 3) << (at * 4 + i / 2 * 2);
      }
      if constexpr (kLanes == 8) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) words[i] = words[i] | Arch::shuffle_xor(words[i], 4);
      }
      bool const is_high = at & 2, is_odd = at & 1;
      uint32_t const keep[2] = {is_high ? words[2] : words[0], is_high ? words[3] : words[1]};
      uint32_t const give[2] = {is_high ? words[0] : words[2], is_high ? words[1] : words[3]};
      uint32_t const even = keep[0] | Arch::shuffle_xor(give[0], 2);
      uint32_t const odd = keep[1] | Arch::shuffle_xor(give[1], 2);
      return (is_odd ? odd : even) | Arch::shuffle_xor(is_odd ? even : odd, 1);
    }

    // Bits 0 and 1: whether bytes 0 and 1 are nonzero. Bits 16 and 17: bytes 2 and 3.
    CUTE_DEVICE static uint32_t pairs_of(uint32_t bytes) {
      bytes |= bytes >> 4;
      bytes |= bytes >> 2;
      bytes |= bytes >> 1;
      bytes &= 0x01010101u;
      return bytes | bytes >> 7;
    }
  };
};

}  // namespace cutlass_attn
