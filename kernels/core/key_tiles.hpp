// Key tiles that a tile of rows goes through. Producers and consumers iterate over equal lists.
//
//   RangeTiles   tiles of an interval mask, from the last to the first
//   MapTiles     tiles of a mask map, from the last to the first
//
// Both are made from a Start. Interface:
//   key()        first key of the present tile
//   has_tile()   whether there is a present tile
//   is_full()    whether every row sees every key of it
//   advance()    to the next tile
// first_key() and is_full_at() describe the first tile. They read the Start in place, because a
// copy of it would take registers.
//
//   RangeTilesAhead   tiles of an interval mask, in either direction
//   MapTilesAhead     tiles of a mask map, from the last to the first
//
// These two are for kernels whose threads both copy and compute. They also know the next tile,
// because its copy starts before the present tile is done: next_key(), valid after look_ahead().
// These kernels have few registers left, so the iterators hold only positions and read the rest in
// place.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/mask.hpp"
#include "core/mask_map.hpp"

namespace cutlass_attn {

template <int kKeys>
struct RangeTiles {
  using Start = TileRange;  // in keys; at least one tile
  // Whether advance() is slow enough to be overlapped with products in flight.
  static constexpr bool kAdvancesEarly = false;
  TileRange range;
  int32_t at;

  CA_HOST_DEVICE explicit RangeTiles(Start const& start) : range(start), at(first_key(start)) {}
  CA_HOST_DEVICE static int32_t first_key(Start const& start) { return start.end - kKeys; }
  CA_HOST_DEVICE static bool is_full_at(Start const& start, int32_t key) {
    return start.is_full(key);
  }

  CA_HOST_DEVICE int32_t key() const { return at; }
  CA_HOST_DEVICE bool has_tile() const { return at >= range.begin; }
  CA_HOST_DEVICE bool is_full() const { return range.is_full(at); }
  CA_HOST_DEVICE void advance() { at -= kKeys; }

  // No tile with keys from `end` on counts as full.
  CA_HOST_DEVICE void end_full(int32_t end) {
    end = end - kKeys + 1;
    range.full_end = end < range.full_end ? end : range.full_end;
  }
};

namespace detail {
CA_HOST_DEVICE int32_t last_bit(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(int(x));
#else
  return 31 - __builtin_clz(x);
#endif
}
}  // namespace detail

template <int kKeys>
struct MapTiles {
  using Start = MapTiles;
  static constexpr bool kAdvancesEarly = true;
  MaskWord const* words;
  uint32_t left;  // tiles of this word that come after the present tile
  uint32_t all;   // full tiles of this word
  int32_t word;   // index of the present word
  int32_t tile;   // present tile; -1: none
  int32_t full_end;

  MapTiles() = default;
  // Starts at the last tile. For rows that see no key, that is a tile beyond the last key, which
  // TMA fills with zeros.
  CA_HOST_DEVICE MapTiles(MaskMap const& map, int64_t row)
      : words(map.words_of(row)), left(0), all(0), word(map.num_words), full_end(INT32_MAX) {
    advance();
    if (tile < 0) tile = map.key_tiles + 1;
  }
  CA_HOST_DEVICE static int32_t first_key(Start const& start) { return start.key(); }
  CA_HOST_DEVICE static bool is_full_at(Start const& start, int32_t) { return start.is_full(); }

  CA_HOST_DEVICE int32_t key() const { return tile * kKeys; }
  CA_HOST_DEVICE bool has_tile() const { return tile >= 0; }
  CA_HOST_DEVICE bool is_full() const { return has_no_bits() && key() + kKeys <= full_end; }
  // Whether the map has no bits for the tile, because every row sees every key of it.
  CA_HOST_DEVICE bool has_no_bits() const { return all >> (tile & 31) & 1; }
  CA_HOST_DEVICE void advance() {
    while (left == 0) {
      if (word == 0) {
        tile = -1;
        return;
      }
      MaskWord const next = words[--word];
      left = next.any;
      all = next.all;
    }
    int32_t const bit = detail::last_bit(left);
    left ^= 1u << bit;
    tile = word * 32 + bit;
  }

  CA_HOST_DEVICE void end_full(int32_t end) { full_end = end; }
};

template <int kKeys, bool kIsReversed>
struct RangeTilesAhead {
  static constexpr int32_t kStep = kIsReversed ? -kKeys : kKeys;
  int32_t at;

  CA_HOST_DEVICE static int32_t first_key(TileRange const& range) {
    return kIsReversed ? range.end - kKeys : range.begin;
  }
  CA_HOST_DEVICE int32_t key() const { return at; }
  CA_HOST_DEVICE bool has_tile(TileRange const& range) const {
    return kIsReversed ? at >= range.begin : at < range.end;
  }
  CA_HOST_DEVICE void look_ahead() {}
  CA_HOST_DEVICE int32_t next_key() const { return at + kStep; }
  CA_HOST_DEVICE void advance() { at += kStep; }
};

template <int kKeys>
struct MapTilesAhead {
  MaskWord const* const& words;  // map of the tile of rows
  // 2 * index of a tile + is_full; -1: none.
  int32_t at, next;

  // The last tile before tile `number`.
  CA_HOST_DEVICE static int32_t before(MaskWord const* words, int32_t number) {
    uint32_t wanted = (1u << (number & 31)) - 1;  // bits of the candidates in the present word
    for (int32_t word = number >> 5; word >= 0; --word, wanted = ~0u) {
      if (wanted == 0) continue;
      MaskWord const found = words[word];
      if ((found.any & wanted) == 0) continue;
      int32_t const bit = detail::last_bit(found.any & wanted);
      return (word * 32 + bit) * 2 + int32_t(found.all >> bit & 1);
    }
    return -1;
  }

  CA_HOST_DEVICE int32_t key() const { return key_of(at); }
  CA_HOST_DEVICE bool has_tile() const { return at >= 0; }
  CA_HOST_DEVICE bool is_full() const { return at & 1; }
  CA_HOST_DEVICE void look_ahead() { next = before(words, at >> 1); }
  CA_HOST_DEVICE int32_t next_key() const { return key_of(next); }
  CA_HOST_DEVICE void advance() { at = next; }

 private:
  CA_HOST_DEVICE static int32_t key_of(int32_t tile) { return (tile >> 1) * kKeys; }
};

}  // namespace cutlass_attn
