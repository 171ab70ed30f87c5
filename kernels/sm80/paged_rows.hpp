// Row addresses of the key tiles that a block copies from pages, in the order of the loop.
//
//   K(n) copied   place V(n)     look up tile n+1
//   V(n) copied   place K(n+1)
//
// Several lanes copy one row, and they copy several rows one after the other. They divide the
// address work: each lane looks up the page of some of these rows and stores their addresses in
// shared memory for the other lanes. So one lane does the 64-bit division and multiplication, and a
// copy begins with an address, not with a wait for the block table.
#pragma once

#include <cute/config.hpp>

#include "core/divide.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn::sm80 {

// Copy: TileCopy of K. A warp copies equal rows of K and V.
template <class Config, class Arch, class Copy, bool kIsReversed>
struct PagedRows {
  using Kv = typename Config::Kv;
  static constexpr int kLanes = Copy::Tile::kVectors;                     // that copy a row
  static constexpr int kLookUps = (Copy::kPasses + kLanes - 1) / kLanes;  // per lane

  Problem const& p;
  typename Config::BlockInfo& shared;
  int const thread;
  uint32_t page[kLookUps] = {};  // of this lane's rows in the tile that was looked up

  // Looks up the tile at `key`, which may be beyond the last.
  CUTE_DEVICE void look_up(int key, int seqlen_k) {
    if (p.kv.block_table == nullptr) return;
    CUTE_UNROLL
    for (int i = 0; i < kLookUps; ++i) {
      page[i] = uint32_t(shared.pages[shared.by_page(key_of(key + row(i), seqlen_k))]);
    }
  }

  // Stores the addresses of that tile's rows in shared.rows, for this warp, whose copies from the
  // previous addresses have started. `t`: K or V. `first`: address of row 0 of page 0.
  CUTE_DEVICE void place(Kv const* first, Operand const& t, int key, int seqlen_k) const {
    Arch::sync_warp();  // rows empty
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
  // Row of the tile that this lane handles in look-up i; may be beyond the tile.
  CUTE_DEVICE int row(int i) const {
    return (thread % kLanes + i * kLanes) * Copy::kRowsAtOnce + Copy::row(thread);
  }
  // Clamps a key to the sequence.
  CUTE_DEVICE static int key_of(int wanted, int seqlen_k) {
    if (kIsReversed && wanted < 0) return 0;
    return wanted < seqlen_k ? wanted : seqlen_k - 1;
  }
};

}  // namespace cutlass_attn::sm80
