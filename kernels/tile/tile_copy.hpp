// Copies tiles from global to shared memory, and O back: by cp.async of 16 bytes, or element by
// element if the rows of a call are not aligned to 16 bytes.
#pragma once

#include <cute/config.hpp>

#include "core/opaque.hpp"
#include "core/scheduler.hpp"
#include "core/vector.hpp"
#include "tile/swizzle.hpp"

namespace cutlass_attn {

// The threads of a block share the 16-byte vectors of a tile: 8 or 4 consecutive threads copy one
// row, and a pass copies kRowsAtOnce rows. Two 8-bit elements count as one column of the tile.
template <class Arch, class Element, class Tile_, int kThreads>
struct TileCopy {
  using Tile = Tile_;
  using Address = typename Arch::SmemAddress;
  static constexpr int kElements = 2 / int(sizeof(Element));  // per column of the tile
  static constexpr int kChunk = Tile::kChunk * kElements;
  static constexpr int kRowsAtOnce = kThreads / Tile::kVectors;
  static constexpr int kPasses = (Tile::kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0, "so that a thread's rows are permuted alike");

  CUTE_DEVICE static int row(int thread) { return thread / Tile::kVectors; }
  CUTE_DEVICE static int column(int thread) { return thread % Tile::kVectors * (8 * kElements); }

  // Byte offset of the thread's first vector in a tile.
  CUTE_DEVICE static int offset(int thread) {
    return Tile::offset(row(thread), column(thread) / kElements);
  }

  // Byte offset from the thread's first vector to its vector of pass i in chunk c.
  CUTE_DEVICE static constexpr int step(int i, int c) {
    return i * kRowsAtOnce * Tile::kRowBytes + c * Tile::kChunkBytes;
  }

  // Whether the thread has a row in pass i.
  CUTE_DEVICE static bool has_row(int i, int thread) {
    return Tile::kRows % kRowsAtOnce == 0 || i * kRowsAtOnce + row(thread) < Tile::kRows;
  }

  // Starts the copy of a full tile. Columns from `columns` on are zero-filled and not read.
  // `target`: address of the tile plus offset(). `source`: address of the thread's first vector.
  CUTE_DEVICE static void load_whole(Address target, Element const* source, int64_t row_stride,
                                     int columns, int thread) {
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      if (has_row(i, thread)) load_row(target + step(i, 0), source, true, columns, thread);
      source += kRowsAtOnce * row_stride;
    }
  }

  // Starts the copy of a full tile, and advances `source` to the next tile. Reads all columns of
  // the tile, so memory beyond the end of a row must be readable. Zero-fills unless `is_there`.
  // Branchless, with one multiply-add per address.
  CUTE_DEVICE static void load_next(bool is_there, Address target, Element const*& source,
                                    uint32_t stride) {
    static_assert(Tile::kRows % kRowsAtOnce == 0);
    stride = opaque(stride);  // otherwise it is shifted in 64 bits, then truncated
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      Element const* const row = source + uint64_t(stride) * (i * kRowsAtOnce);
      CUTE_UNROLL
      for (int c = 0; c < Tile::kChunks; ++c) {
        Arch::cp_async(target + step(i, c), row + c * kChunk, is_there);
      }
    }
    source += uint64_t(stride) * Tile::kRows;
  }

  // Starts the copy of a tile with `rows` valid rows.
  CUTE_DEVICE static void load(Address target, Element const* source, int64_t row_stride, int rows,
                               int columns, int thread) {
    load(target, source, row_stride, [&](int r) { return r < rows; }, columns, thread);
  }
  // Starts the copy of the rows r with is_row(r). The other rows are zero-filled and not read.
  template <class IsRow>
  CUTE_DEVICE static void load(Address target, Element const* source, int64_t row_stride,
                               IsRow const& is_row, int columns, int thread) {
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      bool const inside = is_row(i * kRowsAtOnce + row(thread));
      if (has_row(i, thread)) load_row(target + step(i, 0), source, inside, columns, thread);
      source += kRowsAtOnce * row_stride;
    }
  }

  // Starts the copy of a tile from scattered rows. row_address(r): address of this thread's first
  // vector in row r; called for every row, also where is_row(r) is false.
  template <class RowAddress, class IsRow>
  CUTE_DEVICE static void load_rows(Address target, RowAddress&& row_address, IsRow const& is_row,
                                    int columns, int thread) {
    // all addresses are loaded before the first copy, because they come from memory
    Element const* sources[kPasses];
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) sources[i] = row_address(i * kRowsAtOnce + row(thread));
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      bool const inside = is_row(i * kRowsAtOnce + row(thread));
      if (has_row(i, thread)) load_row(target + step(i, 0), sources[i], inside, columns, thread);
    }
  }

  // Synchronous copy of a tile with any alignment. The loops are not unrolled, because unrolled
  // they take registers from the main loop.
  CUTE_DEVICE static void load_elements(Address target, Element const* source, int64_t row_stride,
                                        int rows, int columns, int thread) {
    CUTE_NO_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      if (!has_row(i, thread)) break;
      load_row_elements(target + step(i, 0), source,
                        i * kRowsAtOnce + row(thread) < rows ? columns : 0, thread);
      source += kRowsAtOnce * row_stride;
    }
  }

  // Copies a tile of Q, with rows of several heads if heads are packed. `Queries`: a
  // BasicTileCoord. `IsAligned`: bool, or std::true_type for kernels of aligned calls only.
  template <class Queries, class IsAligned>
  CUTE_DEVICE static void load_queries(Address target, Problem const& p, Queries const& tile,
                                       IsAligned is_aligned, int thread) {
    if (!is_aligned) {
      CUTE_NO_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        if (!has_row(i, thread)) break;
        int const r = i * kRowsAtOnce + row(thread);
        bool const inside = r < tile.rows;
        load_row_elements(target + step(i, 0), query_source(p, tile, inside ? r : 0, thread),
                          inside ? p.head_dim : 0, thread);
      }
      return;
    }
    if (tile.heads == 1) {
      Element const* source = query_source(p, tile, row(thread), thread);
      if (tile.rows == Tile::kRows) {
        load_whole(target, source, p.q.row_stride, p.head_dim, thread);
      } else {
        load(target, source, p.q.row_stride, tile.rows, p.head_dim, thread);
      }
      return;
    }
    for (int i = 0; i < kPasses; ++i) {
      if (!has_row(i, thread)) break;
      int const r = i * kRowsAtOnce + row(thread);
      bool const inside = r < tile.rows;
      load_row(target + step(i, 0), query_source(p, tile, inside ? r : 0, thread), inside,
               p.head_dim, thread);
    }
  }

  // Stores the tile of O at `smem`.
  template <class Queries, class IsAligned>
  CUTE_DEVICE static void store_output(char const* smem, Problem const& p, Queries const& tile,
                                       IsAligned is_aligned, int thread) {
    char const* const from = smem + offset(thread);
    Element* target = tile.template row_of<Element>(p.o, row(thread)) + column(thread);
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      int const r = i * kRowsAtOnce + row(thread);
      if (r >= tile.rows || !has_row(i, thread)) break;
      if (i > 0 && tile.heads > 1) {
        target = tile.template row_of<Element>(p.o, r) + column(thread);
      }
      CUTE_UNROLL
      for (int c = 0; c < Tile::kChunks; ++c) {
        if (column(thread) + c * kChunk < p.head_dim_v) {
          store_vector(target + c * kChunk, from + step(i, c), is_aligned);
        }
      }
      target += kRowsAtOnce * p.o.row_stride;
    }
  }

 private:
  CUTE_DEVICE static void load_row(Address target, Element const* source, bool is_row, int columns,
                                   int thread) {
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      bool const inside = is_row && column(thread) + c * kChunk < columns;
      Arch::cp_async(target + step(0, c), source + c * kChunk, inside);
    }
  }

  // `columns`: 0 for a row beyond the last.
  CUTE_DEVICE static void load_row_elements(Address target, Element const* source, int columns,
                                            int thread) {
    CUTE_NO_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      uint32_t words[4] = {0, 0, 0, 0};
      if (column(thread) + c * kChunk < columns) {
        Element const* const vector = source + c * kChunk;
        CUTE_UNROLL
        for (int i = 0; i < 8 * kElements; ++i) {
          words[i / (2 * kElements)] |= uint32_t(vector[i].raw())
                                        << i % (2 * kElements) * (16 / kElements);
        }
      }
      Arch::store_shared(target + step(0, c), words);
    }
  }

  // Address of the thread's first vector in a row of Q.
  template <class Queries>
  CUTE_DEVICE static Element const* query_source(Problem const& p, Queries const& tile, int r,
                                                 int thread) {
    return tile.template row_of<Element const>(p.q, r) + column(thread);
  }

  template <class IsAligned>
  CUTE_DEVICE static void store_vector(Element* target, char const* from, IsAligned is_aligned) {
    if (is_aligned) {
      *reinterpret_cast<Vector16*>(target) = *reinterpret_cast<Vector16 const*>(from);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) target[i] = reinterpret_cast<Element const*>(from)[i];
    }
  }
};

}  // namespace cutlass_attn
