// Where the rows are of the tiles of keys that a block copies from pages, one tile after the other.
//
//   K(n) copied   place V(n)     look up tile n+1
//   V(n) copied   place K(n+1)
//
// Lanes that copy a row side by side share out the rows that they copy one after the other: each
// looks up the page of its own, and leaves the row's address in shared memory for the others. So
// one of them divides and multiplies in 64 bits, and a copy begins with an address, not with a wait
// for the block table and what follows from it.
#pragma once

#include "core/divide.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn::sm80 {

// Copy: the TileCopy of K. V's has the same rows for a warp.
template <class Config, class Arch, class Copy, bool kIsReversed>
struct PagedRows {
  using Kv = typename Config::Kv;
  static constexpr int kLanes = Copy::Tile::kVectors;                     // that copy a row
  static constexpr int kLookUps = (Copy::kPasses + kLanes - 1) / kLanes;  // of a lane

  Problem const& p;
  typename Config::BlockInfo& shared;
  int const thread;
  uint32_t page[kLookUps] = {};  // in which this lane's rows are of the tile that was looked up

  // For the tile that begins at `key`, perhaps beyond the last.
  CUTE_DEVICE void look_up(int key, int seqlen_k) {
    if (p.kv.block_table == nullptr) return;
    CUTE_UNROLL
    for (int i = 0; i < kLookUps; ++i) {
      page[i] = uint32_t(shared.pages[shared.by_page(key_of(key + row(i), seqlen_k))]);
    }
  }

  // Addresses of that tile's rows, in shared.rows for this warp, which has copied from those
  // before. `t` is K or V, `first` where row 0 of page 0 is.
  CUTE_DEVICE void place(Kv const* first, Operand const& t, int key, int seqlen_k) const {
    Arch::sync_warp();  // rows read by none any more
    CUTE_UNROLL
    for (int i = 0; i < kLookUps; ++i) {
      int const at = key_of(key + row(i), seqlen_k);
      auto const in_page = uint32_t(at - shared.by_page(at) * p.kv.page_size);
      if (row(i) < Config::kBlockN) {
        shared.rows[row(i)] = first + page[i] * t.batch_stride + in_page * t.row_stride;
      }
    }
  }

 private:
  // Of the tile, the row of this lane in look-up i; of some lanes beyond it.
  CUTE_DEVICE int row(int i) const {
    return (thread % kLanes + i * kLanes) * Copy::kRowsAtOnce + Copy::row(thread);
  }
  // Rows beyond the last stand for the last, which is there, and those before the first for it.
  CUTE_DEVICE static int key_of(int wanted, int seqlen_k) {
    if (kIsReversed && wanted < 0) return 0;
    return wanted < seqlen_k ? wanted : seqlen_k - 1;
  }
};

}  // namespace cutlass_attn::sm80
