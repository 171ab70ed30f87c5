// Tiles of packed sequences, whose lengths only the device knows.
//
// The grid has slots for tiles. A sequence whose rows are [a, b) of all packed rows has b / m - a /
// m + 1 slots for tiles of m rows. That is at least the ceil((b - a) / m) tiles that it has, and at
// most one more. So the first slot of a sequence depends on `a` alone, and no prefix sum over the
// batch is needed.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

// Tiles of `rows` rows. Each row of a sequence has `heads` rows in the tiles (heads that share a
// tile).
struct PackedTiles {
  int32_t const* cu_seqlens;
  int32_t heads, rows;

  // The number of slots for all entries.
  static int64_t slots(int64_t total, int32_t heads, int32_t rows, int32_t batch) {
    return total * heads / rows + batch;
  }

  CA_HOST_DEVICE int first_slot(int batch) const {
    return cu_seqlens[batch] * heads / rows + batch;
  }

  // The entry, of `count` entries, that a slot belongs to: the last one whose first slot is not
  // beyond it. Called by all lanes of a warp, which compare 32 entries at a time.
  template <class Arch>
  CA_HOST_DEVICE int entry_of(int slot, int count) const {
    int first = 0;
    if (slot < first_slot(0)) return first;
    while (count > 1) {
      int const step = (count + 31) / 32;
      int const at = Arch::thread() % 32 * step;
      int found = at < count && first_slot(first + at) <= slot;
      CA_UNROLL
      for (int lanes = 1; lanes < 32; lanes *= 2) found += Arch::shuffle_xor(found, lanes);
      int const skipped = (found - 1) * step;
      first += skipped;
      count = count - skipped < step ? count - skipped : step;
    }
    return first;
  }
};

}  // namespace cutlass_attn
