// Copies of tiles whose rows may end inside the tile.
#pragma once

#include <cute/tensor.hpp>

namespace cutlass_attn {

// Starts the asynchronous copy of this thread's part of a tile from global to shared memory. Rows
// from `rows` on are filled with zeros and not read: what lies beyond a sequence never matters.
//   src, dst: (vector, row, column)     coord: their coordinates in the tile
template <class TiledCopy, class Src, class Dst, class Coord>
CUTE_DEVICE void load_rows(TiledCopy const& tiled, Src const& src, Dst&& dst, Coord const& coord,
                           int rows) {
  using namespace cute;
  CUTE_UNROLL
  for (int i = 0; i < size<1>(src); ++i) {
    auto const atom = tiled.with(get<0>(coord(0, i, 0)) < rows);
    CUTE_UNROLL
    for (int j = 0; j < size<2>(src); ++j) copy(atom, src(_, i, j), dst(_, i, j));
  }
}

// Stores this thread's part of a tile from shared to global memory, rows below `rows` only.
template <class TiledCopy, class Src, class Dst, class Coord>
CUTE_DEVICE void store_rows(TiledCopy const& tiled, Src const& src, Dst&& dst, Coord const& coord,
                            int rows) {
  using namespace cute;
  CUTE_UNROLL
  for (int i = 0; i < size<1>(src); ++i) {
    if (get<0>(coord(0, i, 0)) < rows) copy(tiled, src(_, i, _), dst(_, i, _));
  }
}

}  // namespace cutlass_attn
