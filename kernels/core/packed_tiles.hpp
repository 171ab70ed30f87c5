// Tiles of packed sequences, whose lengths only the device knows.
//
// The grid reserves slots for tiles of m rows. A sequence with the packed rows [a, b) gets b / m -
// a / m + 1 slots. It has ceil((b - a) / m) tiles, so at most one slot is unused. The first slot
// depends on `a` alone, so no prefix sum over the batch is needed.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

// rows: rows of a tile. heads: query heads packed into a tile; each row of a sequence contributes
// `heads` tile rows.
struct PackedTiles {
  int32_t const* cu_seqlens;
  int32_t heads, rows;

  // Number of slots of all entries.
  static int64_t slots(int64_t total, int32_t heads, int32_t rows, int32_t batch) {
    return total * heads / rows + batch;
  }

  CA_HOST_DEVICE int first_slot(int batch) const {
    return cu_seqlens[batch] * heads / rows + batch;
  }

  // The entry, of `count` entries, that a slot belongs to: the last one whose first slot is <=
  // slot. Called by all lanes of a warp, which compare 32 entries at a time.
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
