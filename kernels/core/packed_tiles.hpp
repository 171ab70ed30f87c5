// Tiles of packed sequences, of which only the device knows the lengths.
//
// A grid has slots for tiles. Of packed entries the rows before one tell its first slot: from a to
// b rows it is b / m - a / m + 1 slots to the next entry, which is never fewer than the (b - a) / m
// tiles, rounded up, that it has, and at most one more. So no sum over the entries is needed.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

// Tiles of `rows` rows, with so many rows to every row of the sequence (heads that share a tile).
struct PackedTiles {
  int32_t const* cu_seqlens;
  int32_t heads, rows;

  // Of all entries together.
  static int64_t slots(int64_t total, int32_t heads, int32_t rows, int32_t batch) {
    return total * heads / rows + batch;
  }

  CA_HOST_DEVICE int first_slot(int batch) const {
    return cu_seqlens[batch] * heads / rows + batch;
  }

  // Which of `count` entries a slot is of: the last whose first slot is not beyond it. All lanes of
  // a warp look together, at 32 entries at a time.
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
