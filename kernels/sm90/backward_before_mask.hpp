// The launch before a backward kernel with a bool mask: row statistics and zeros, as without a
// mask, and the query map (core/query_map.hpp).
//
// Grid:      the blocks of BackwardBefore or BackwardBeforeBias, then one block per four
//            tiles of the map
// Block:     one warp per tile of the map
// Thread:    four neighbouring keys of each 64, and half of the queries: 16 lanes cover a row of 64
//            keys; the lower half of the warp has rows n8 + 0 to 3, the upper half n8 + 4 to 7
// Registers: one bit per logit of the tile. If the tile is partial, the warp shuffles the bits into
//            words, in the order of the accumulator S
#pragma once

#include "sm90/backward_params.hpp"
#include "tile/backward_rows.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn::sm90 {

// A warp's tile of the map.
template <int kBlockN, class Arch>
struct QueryMapTile {
  static constexpr int kGroups = kBlockN / 64, kQueries = QueryMap::kQueries;
  // bits[2 group + h][c] has one byte for each of this lane's four keys of a group. Bit 2 n + r of
  // a byte is query (4 h + n) 8 + 4 half + 2 c + r.
  static constexpr int kParts = 2 * kGroups;
  using Bits = uint32_t[kParts][2];

  MaskBackwardParams const& params;
  PerLogit const& mask;
  int const number;  // index of the tile
  int batch, head, first_key, first_query, last_query;

  CUTE_DEVICE QueryMapTile(MaskBackwardParams const& params, int number)
      : params(params), mask(params.problem.mask.elements), number(number) {
    QueryMap const& map = params.map;
    int const row = number / map.query_tiles, unit = row / map.key_tiles;
    batch = unit / map.num_heads;
    head = unit - batch * map.num_heads;
    first_key = (row - unit * map.key_tiles) * kBlockN;
    first_query = (number - row * map.query_tiles) * kQueries;
    int const last = first_query + kQueries - 1, seqlen = params.problem.seq_q.seqlen;
    last_query = last < seqlen ? last : seqlen - 1;
  }

  CUTE_DEVICE void run() const {
    Problem const& p = params.problem;
    IntervalMask const interval = params.template mask<true>({p.seq_q.seqlen, p.seq_k.seqlen});
    bool const has_keys =
        interval.hi(last_query) > first_key && interval.lo(first_query) < first_key + kBlockN;
    bool const has_all =
        interval.lo(last_query) <= first_key && interval.hi(first_query) >= first_key + kBlockN;
    auto found = TileClass::kEmpty;
    if (has_keys) {
      Bits bits = {};
      gather(interval, has_all, bits);
      found = classify(bits);
      if (found == TileClass::kPartial) store(bits);
    }
    if (lane() == 0) params.map.classes[number] = found;
  }

 private:
  CUTE_DEVICE static int lane() { return Arch::thread() % 32; }
  CUTE_DEVICE static int half() { return lane() / 16; }
  // First of this lane's keys in a group of 64.
  CUTE_DEVICE int key(int group) const { return first_key + group * 64 + lane() % 16 * 4; }

  // Not unrolled: unrolled code makes warps stall on instruction fetches.
  CUTE_DEVICE void gather(IntervalMask const& interval, bool has_all, Bits& bits) const {
    int const seqlen_k = params.problem.seq_k.seqlen;
    uint64_t const places = reinterpret_cast<uint64_t>(mask.data) |
                            uint64_t(mask.batch_stride | mask.head_stride | mask.row_stride);
    bool const is_vector =
        mask.key_stride == 1 && places % 4 == 0 && first_key + kBlockN <= seqlen_k;
    CUTE_NO_UNROLL
    for (int part = 0; part < kParts; ++part) {
      int const key = this->key(part / 2), first = first_query + part % 2 * 32 + half() * 4;
      auto const* const from = static_cast<uint8_t const*>(mask.data) + batch * mask.batch_stride +
                               head * mask.head_stride + key * mask.key_stride;
      auto const load = [&](int query) {
        return *reinterpret_cast<uint32_t const*>(from + query * mask.row_stride);
      };
      auto const load_bytes = [&](int query) {
        uint32_t word = 0;
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          uint8_t const* const at = from + query * mask.row_stride + j * mask.key_stride;
          if (key + j < seqlen_k) word |= uint32_t(*at) << 8 * j;
        }
        return word;
      };
      uint32_t found[2];
      if (!is_vector) {
        gather(load_bytes, first, found);
      } else if (mask.row_stride == 0) {
        uint32_t const all_rows = load(0);
        gather([&](int) { return all_rows; }, first, found);
      } else {
        gather(load, first, found);
      }
      if (!has_all) apply_interval(interval, key, part % 2, found);
      // Rotates the array, because constant indices keep it in registers.
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c)
          bits[i][c] = i + 1 < kParts ? bits[(i + 1) % kParts][c] : found[c];
      }
    }
  }
  // load(query): four bytes. Queries beyond the last read the last one.
  template <class Load>
  CUTE_DEVICE void gather(Load const& load, int first, uint32_t (&found)[2]) const {
    uint32_t bytes[2][8];
    CUTE_UNROLL
    for (int c = 0; c < 2; ++c) {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        int const query = first + i / 2 * 8 + c * 2 + i % 2;
        bytes[c][i] = load(query < last_query ? query : last_query);
      }
    }
    CUTE_UNROLL
    for (int c = 0; c < 2; ++c) {
      found[c] = 0;
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) found[c] |= high_bits(bytes[c][i]) >> (7 - i);
    }
  }
  // High bit of each byte: whether the byte is nonzero.
  CUTE_DEVICE static uint32_t high_bits(uint32_t bytes) {
    return (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
  }

  CUTE_DEVICE void apply_interval(IntervalMask const& interval, int key, int h,
                                  uint32_t (&found)[2]) const {
    CUTE_NO_UNROLL
    for (int j = 0; j < 4; ++j) {
      bool const is_key = key + j < interval.seqlen_k;
      int const begin = is_key ? interval.q_lo(key + j) - first_query : 0;
      int const end = is_key ? interval.q_hi(key + j) - first_query : 0;
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        FragmentPlace<1, 1> const place{half() * 2 + c};
        uint32_t const seen_by = place.columns_before(end) & ~place.columns_before(begin);
        found[c] &= ~((~(seen_by >> 8 * h) & 0xff) << 8 * j);
      }
    }
  }

  CUTE_DEVICE static TileClass classify(Bits const& bits) {
    uint32_t any = 0, all = ~0u;
    CUTE_UNROLL
    for (auto const& part : bits) {
      any |= part[0] | part[1];
      all &= part[0] & part[1];
    }
    if (!Arch::any(any != 0)) return TileClass::kEmpty;
    return Arch::any(all != ~0u) ? TileClass::kPartial : TileClass::kFull;
  }

  // A thread's S has keys g and g + 8 of its warp's 16. Here, two lanes that are two apart hold the
  // bits of these keys. They exchange bits, and each writes the words of one pair of queries.
  CUTE_DEVICE void store(Bits const& bits) const {
    bool const is_upper = lane() & 2;
    int const pair = half() * 2 + is_upper;  // queries 2 pair and 2 pair + 1 of each 8
    uint32_t* const to = params.map.bits + int64_t(number) * (kBlockN * 2) + lane() % 16 / 4 * 32 +
                         lane() % 2 * 16 + pair;
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      uint32_t low[2], high[2];  // of keys g, of keys g + 8
      CUTE_UNROLL
      for (int h = 0; h < 2; ++h) {
        uint32_t const(&part)[2] = bits[2 * g + h];
        uint32_t const keep = is_upper ? part[1] : part[0];
        uint32_t const got = Arch::shuffle_xor(is_upper ? part[0] : part[1], 2);
        low[h] = is_upper ? got : keep;
        high[h] = is_upper ? keep : got;
      }
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        to[g * 128 + j * 4] = spread(low[0] >> 8 * j, low[1] >> 8 * j) |
                              spread(high[0] >> 8 * j, high[1] >> 8 * j) << 2;
      }
    }
  }
  // Low bytes of two words, with their pairs of bits spread to a distance of four.
  CUTE_DEVICE static uint32_t spread(uint32_t x, uint32_t y) {
    x = (x & 0xff) | (y & 0xff) << 16;
    x = (x | x << 4) & 0x0f0f0f0fu;
    return (x | x << 2) & 0x33333333u;
  }
};

// Before: the launch before the kernel without a mask.
template <class Before, int kBlockN>
struct BackwardBeforeMask : Before {
  using Params = MaskBackwardParams;

  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    int const others = int(params.blocks_before());
    if (Arch::block() < others) return Before::template run<Arch>(params, smem);
    int const tile = (Arch::block() - others) * Params::kTilesOfBlock + Arch::thread() / 32;
    if (tile < params.map.tiles()) QueryMapTile<kBlockN, Arch>(params, tile).run();
  }
};

}  // namespace cutlass_attn::sm90
