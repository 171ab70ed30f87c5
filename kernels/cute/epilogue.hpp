// From accumulators to global memory: O through shared memory in 16-byte stores, and LSE.
#pragma once

#include <cute/tensor.hpp>

#include "cute/scheduler.hpp"

namespace cutlass_attn {

// Stores rows of a tile that lies in shared memory, `Tile` laying it out, to o; by all threads.
template <class Arch, class Tile, class Element, int kRows, int kThreads>
CUTE_DEVICE void store_rows(AttnParams const& p, TileCoord const& coord, char const* smem) {
  constexpr int kRowsAtOnce = kThreads / Tile::kVectors;
  // As a number of its own, or the compiler keeps what loading Q made of it, through the whole
  // loop.
  int thread = Arch::thread();
  asm volatile("" : "+r"(thread));
  int const row0 = thread / Tile::kVectors, column = thread % Tile::kVectors * 8;
  CUTE_UNROLL
  for (int i = 0; i < (kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
    int const row = row0 + i * kRowsAtOnce;
    if (row >= coord.rows) break;
    Element* const target = coord.row_of<Element>(p.o, row) + column;
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      if (column + c * Tile::kChunk >= p.head_dim_v) break;
      *reinterpret_cast<cute::uint128_t*>(target + c * Tile::kChunk) =
          *reinterpret_cast<cute::uint128_t const*>(smem +
                                                    Tile::offset(row, column + c * Tile::kChunk));
    }
  }
}

}  // namespace cutlass_attn
