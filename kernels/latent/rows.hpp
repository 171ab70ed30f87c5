// Copies columns of tiles of K or V: from a contiguous cache, from pages, or by a list of rows.
#pragma once

#include <cute/config.hpp>
#include <type_traits>

#include "core/divide.hpp"
#include "core/mask.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn {

// Addresses of a block's rows of K, or of V.
template <class Element>
struct LatentSource {
  using Row = Element const*;
  Element const* first;  // row 0 of the entry, or of page 0
  int32_t const* pages;  // pages of the entry; null: one, or all in order
  KeyList list;
  KeyRange keys;  // that any row sees; with a list, its entries

  template <class Coord>
  CUTE_DEVICE LatentSource(Problem const& p, Operand const& operand, Coord const& tile,
                           IntervalMask const& mask)
      : first(PagedKv<Element>(p, tile.seq, operand, tile.head_kv).first),
        pages(PagedKv<Element>(p, tile.seq, operand, tile.head_kv).pages),
        list(p, tile.seq.batch, tile.q_begin),
        keys(p.kv.indices ? KeyRange{0, mask.seqlen_k} : mask.keys(tile.q_begin, tile.q_end)) {}
};

// The columns of a tile that a warp copies.
struct LatentColumns {
  int warp;         // index among the warps that divide the columns
  int slice, tail;  // first columns of its ranges
  int end;          // columns of the operand
};

// A warp copies kRows rows of each tile, from row `begin` on. For each row, one lane looks up the
// page or the list entry, computes the address, and stores it in shared memory for the lanes that
// copy the row. Rows are looked up one tile ahead, because block tables and lists are in global
// memory.
//
// Slice, Tail: tiles in shared memory for the warp's two ranges of columns. Tail may be void.
template <class Element, class Slice, class Tail, int kRows, class Arch>
struct LatentRows {
  using Address = typename Arch::SmemAddress;
  static_assert(kRows <= 32, "a lane for each row");

  Problem const& p;
  Operand const& operand;
  FastDivisor const by_page;
  int const lane, begin;
  Element const** const rows;  // addresses of the next tile, in shared memory; null: no key
  LatentColumns const columns;
  LatentSource<Element> const& source;  // in shared memory
  Element const* row = nullptr;         // address of this lane's row in the tile that was looked up

  // Looks up the tile that begins at `key`. place() and copy() then work on that tile.
  CUTE_DEVICE void look_up(int key) {
    int const j = key + begin + lane;
    row = nullptr;
    if (lane >= kRows || !source.keys.contains(j)) return;
    int const at = source.list(j);
    if (at < 0) return;
    int const page = p.kv.has_pages() ? by_page(at) : 0;
    int const number = source.pages ? source.pages[page] : page;
    row = source.first + number * operand.batch_stride +
          (at - page * p.kv.page_size) * operand.row_stride;
  }
  CUTE_DEVICE void look_up_if(int key, int end) {
    if (key < end) look_up(key);
  }

  // Stores the row addresses of that tile in shared memory. Other lanes may read them after a
  // sync_warp().
  CUTE_DEVICE void place() const {
    Arch::sync_warp();  // rows of the previous tile empty
    if (lane < kRows) rows[lane] = row;
  }

  // Bit mask of the tile's rows: set for rows of this warp that are keys.
  CUTE_DEVICE uint32_t present() const { return Arch::ballot(row != nullptr) << begin; }

  // Starts the copy of that tile. Rows that are no keys become zeros.
  CUTE_DEVICE void copy(Address to_slice, Address to_tail) const {
    copy_columns<Slice>(to_slice, columns.slice);
    if constexpr (!std::is_same_v<Tail, void>) copy_columns<Tail>(to_tail, columns.tail);
  }

 private:
  // The lanes copy kRowsAtOnce rows at a time.
  template <class Tile>
  CUTE_DEVICE void copy_columns(Address to, int first_column) const {
    constexpr int kLanes = Tile::kColumns / 8, kRowsAtOnce = 32 / kLanes;
    constexpr int kElements = 2 / int(sizeof(Element));  // per column of the tile
    int const column = lane % kLanes * 8, at = first_column + column * kElements;
    bool const inside = at < columns.end;
    CUTE_UNROLL
    for (int i = 0; i < (kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
      int const r = i * kRowsAtOnce + lane / kLanes;
      if (kRows % kRowsAtOnce != 0 && r >= kRows) break;
      Element const* const from = rows[r];
      Arch::cp_async(to + Tile::offset(begin + r, column), from + at, inside && from);
    }
  }
};

// Has the interface of LatentRows, for K and V that are tensors of their own. Both have the warp's
// slice of columns.
template <class Element, class Slice, int kRows, class Arch>
struct KeyAndValueRows {
  using Rows = LatentRows<Element, Slice, void, kRows, Arch>;
  using Address = typename Arch::SmemAddress;

  Rows k, v;

  CUTE_DEVICE void look_up_if(int key, int end) {
    k.look_up_if(key, end);
    v.look_up_if(key, end);
  }
  CUTE_DEVICE void place() const {
    k.place();
    v.place();
  }
  CUTE_DEVICE uint32_t present() const { return k.present(); }
  CUTE_DEVICE void copy(Address to_k, Address to_v) const {
    k.copy(to_k, to_k);
    v.copy(to_v, to_v);
  }
};

}  // namespace cutlass_attn
