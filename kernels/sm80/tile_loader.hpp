// Asynchronous copies of tiles from global to shared memory.
#pragma once

#include "cute/scheduler.hpp"
#include "sm80/swizzle.hpp"

namespace cutlass_attn::sm80 {

// One thread's share of the copy of a tile of K or V.
template <class Arch, class Element, int kRows, int kColumns, int kThreads>
struct TileLoader {
  using Tile = SwizzledTile<kRows, kColumns>;
  static constexpr int kRowsAtOnce = kThreads / Tile::kVectors;  // 8 or 4 threads side by side
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);

  CUTE_DEVICE static int row(int thread) { return thread / Tile::kVectors; }
  CUTE_DEVICE static int column(int thread) { return thread % Tile::kVectors * 8; }

  // Byte offset in a tile of the thread's first vector.
  CUTE_DEVICE static int offset(int thread) { return Tile::offset(row(thread), column(thread)); }

  // Starts the copy of the rows [begin, begin + kRows) to `target`, which is a tile's address plus
  // offset(), and commits it as one group. `head` is row 0 of `rows`, each of `columns` elements;
  // what is beyond them (all, maybe) is filled with zeros and not read.
  CUTE_DEVICE static void load(typename Arch::SmemAddress target, Element const* head,
                               int64_t row_stride, int begin, int rows, int columns, int thread) {
    Element const* source = head + int64_t(begin + row(thread)) * row_stride + column(thread);
    int const rows_left = rows - begin - row(thread);
    CUTE_UNROLL
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < Tile::kChunks; ++c) {
        bool const inside =
            i * kRowsAtOnce < rows_left && column(thread) + c * Tile::kChunk < columns;
        Arch::async_copy(target + i * kRowsAtOnce * Tile::kRowBytes + c * Tile::kChunkBytes,
                         source + c * Tile::kChunk, inside);
      }
      source += kRowsAtOnce * row_stride;
    }
    Arch::async_copy_commit();
  }
};

// Starts the copy of a tile of Q, whose rows may be those of several heads; by all threads.
template <class Arch, class Tile, class Element, int kRows, int kThreads>
CUTE_DEVICE void load_queries(AttnParams const& p, TileCoord const& coord,
                              typename Arch::SmemAddress tile) {
  constexpr int kRowsAtOnce = kThreads / Tile::kVectors;
  int const row0 = Arch::thread() / Tile::kVectors, column = Arch::thread() % Tile::kVectors * 8;
  CUTE_UNROLL
  for (int i = 0; i < (kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
    int const row = row0 + i * kRowsAtOnce;
    if (kRows % kRowsAtOnce != 0 && row >= kRows) break;
    bool const inside = row < coord.rows;
    Element const* const source = coord.row_of<Element const>(p.q, inside ? row : 0) + column;
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      Arch::async_copy(tile + Tile::offset(row, column + c * Tile::kChunk),
                       source + c * Tile::kChunk, inside && column + c * Tile::kChunk < p.head_dim);
    }
  }
  Arch::async_copy_commit();
}

}  // namespace cutlass_attn::sm80
