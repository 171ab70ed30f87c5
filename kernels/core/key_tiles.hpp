// Which tiles of keys a tile of rows goes through. Producers and consumers iterate over the same
// tiles.
//
//   RangeTiles   those of an interval mask, from the last to the first
//   MapTiles     those of a mask map, likewise
//
// Both are made of a Start and have key(), where the present tile begins; is_there(); is_full(),
// whether every row sees every key of it; and advance(). first_key() and is_full_at(), of the first
// tile, read a Start where it is: a copy takes registers.
//
//   RangeTilesAhead   those of an interval mask, in either direction
//   MapTilesAhead     those of a mask map, from the last to the first
//
// These are for kernels whose threads both copy and compute. They know the next tile as well, whose
// copies begin before the present one is done: next_key(), after look_ahead(). Such kernels are
// short of registers, so all the rest stays where it is.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/mask.hpp"
#include "core/mask_map.hpp"

namespace cutlass_attn {

template <int kKeys>
struct RangeTiles {
  using Start = TileRange;  // in keys, with a tile at least
  // Whether to advance beside products that are waited for, as it takes a while.
  static constexpr bool kAdvancesEarly = false;
  TileRange range;
  int32_t at;

  CA_HOST_DEVICE explicit RangeTiles(Start const& start) : range(start), at(first_key(start)) {}
  CA_HOST_DEVICE static int32_t first_key(Start const& start) { return start.end - kKeys; }
  CA_HOST_DEVICE static bool is_full_at(Start const& start, int32_t key) {
    return start.is_full(key);
  }

  CA_HOST_DEVICE int32_t key() const { return at; }
  CA_HOST_DEVICE bool is_there() const { return at >= range.begin; }
  CA_HOST_DEVICE bool is_full() const { return range.is_full(at); }
  CA_HOST_DEVICE void advance() { at -= kKeys; }

  // Tiles with keys from `end` on are not called full.
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
  uint32_t left;  // tiles of the present word that come after the present tile
  uint32_t all;   // of the present word
  int32_t word;   // the present one
  int32_t tile;   // -1: there is none
  int32_t full_end;

  MapTiles() = default;
  // Begins with the last tile. Where the rows see no key that is a tile beyond the last key, of
  // which TMA makes zeros.
  CA_HOST_DEVICE MapTiles(MaskMap const& map, int64_t row)
      : words(map.words_of(row)), left(0), all(0), word(map.num_words), full_end(INT32_MAX) {
    advance();
    if (tile < 0) tile = map.key_tiles + 1;
  }
  CA_HOST_DEVICE static int32_t first_key(Start const& start) { return start.key(); }
  CA_HOST_DEVICE static bool is_full_at(Start const& start, int32_t) { return start.is_full(); }

  CA_HOST_DEVICE int32_t key() const { return tile * kKeys; }
  CA_HOST_DEVICE bool is_there() const { return tile >= 0; }
  CA_HOST_DEVICE bool is_full() const { return has_no_bits() && key() + kKeys <= full_end; }
  // Whether the map has no bits for the tile because every row sees every key of it.
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
  CA_HOST_DEVICE bool is_there(TileRange const& range) const {
    return kIsReversed ? at >= range.begin : at < range.end;
  }
  CA_HOST_DEVICE void look_ahead() {}
  CA_HOST_DEVICE int32_t next_key() const { return at + kStep; }
  CA_HOST_DEVICE void advance() { at += kStep; }
};

template <int kKeys>
struct MapTilesAhead {
  MaskWord const* const& words;  // of the tile of rows
  // Twice the number of a tile, plus 1 if it is full; -1: there is none.
  int32_t at, next;

  // The last tile before the one with this number.
  CA_HOST_DEVICE static int32_t before(MaskWord const* words, int32_t number) {
    uint32_t wanted = (1u << (number & 31)) - 1;  // of its word
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
  CA_HOST_DEVICE bool is_there() const { return at >= 0; }
  CA_HOST_DEVICE bool is_full() const { return at & 1; }
  CA_HOST_DEVICE void look_ahead() { next = before(words, at >> 1); }
  CA_HOST_DEVICE int32_t next_key() const { return key_of(next); }
  CA_HOST_DEVICE void advance() { at = next; }

 private:
  CA_HOST_DEVICE static int32_t key_of(int32_t tile) { return (tile >> 1) * kKeys; }
};

}  // namespace cutlass_attn
