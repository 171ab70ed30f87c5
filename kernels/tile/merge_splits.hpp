// Partial results of forward blocks that share the keys of a tile of rows, and their merge by the
// last block.
#pragma once

#include "core/key_splits.hpp"
#include "core/softmax.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn {

// Thread t of the last block has the rows and columns of thread t of every other block. So
// fragments of O go through global memory unchanged, in vectors of 16 bytes that neighbouring
// threads write to neighbouring addresses. Out has acc_o and softmax, as
// Result of sm80/operands.hpp.
template <class Config, class Arch, class Out>
struct SplitMerge {
  static constexpr int64_t kFloats = KeySplits::partial_floats(Config::kBlockM, Config::kHeadDimV);
  static constexpr int kRows = Config::kRows;

  struct alignas(16) Quad {  // of an m16n8 block: two columns of two rows
    float values[4];
  };

  KeySplits const& splits;
  typename Config::Place const& place;
  int const unit = splits.unit(Arch::block());

  // Stores this block's result. Returns true in the last block of its tile of rows, which then has
  // the result of all blocks, merged in key order. ticket: shared memory that the main loop no
  // longer uses.
  CUTE_DEVICE bool run(Out& out, int32_t& ticket) const {
    store(partial(splits.split(Arch::block())), out);
    if (!splits.template is_last<Arch>(unit, ticket)) return false;
    merge(out, 0, 1, splits.count);
    return true;
  }

  // run() in two levels. The last block of each group of splits merges the group and stores the
  // result in place of the group's first one; the last of these blocks merges the groups. With many
  // splits of a large O, a single block would take longer to read all splits than the keys take.
  CUTE_DEVICE bool run_in_groups(Out& out, int32_t& ticket) const {
    int const split = splits.split(Arch::block()), size = splits.group;
    int const group = split / size, first = group * size;
    int const left = splits.count - first, groups = KeySplits::groups_of(splits.count, size);
    int32_t* const counters =
        splits.counters + int64_t(unit) * KeySplits::counters_of_tile(splits.count, size);
    int const own = left < size ? left : size;
    store(partial(split), out);
    if (!KeySplits::is_last_of<Arch>(counters[group], own, ticket)) return false;
    merge(out, first, 1, own);
    if (groups == 1) return true;
    Arch::sync();  // rows of the first split empty
    store(partial(first), out);
    if (!KeySplits::is_last_of<Arch>(counters[groups], groups, ticket)) return false;
    merge(out, 0, size, groups);
    return true;
  }

 private:
  CUTE_DEVICE float* partial(int split) const { return splits.partial(unit, split, kFloats); }
  CUTE_DEVICE Quad* quads(float* partial) const {
    return reinterpret_cast<Quad*>(partial) + place.thread;
  }
  CUTE_DEVICE SoftmaxRow* row(float* partial, int i) const {
    float* const states = partial + Config::kBlockM * Config::kHeadDimV;
    return reinterpret_cast<SoftmaxRow*>(states) + place.row(i);
  }

  // Calls visit(m, d, quad) for the m16n8 blocks of a thread.
  template <class Visit>
  CUTE_DEVICE void for_quads(float* partial, Visit&& visit) const {
    constexpr int kColumns = Config::kWarpColumns / 8;
    CUTE_UNROLL
    for (int m = 0; m < Config::kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int d = 0; d < kColumns; ++d) {
        visit(m, d, quads(partial)[(m * kColumns + d) * Config::kThreads]);
      }
    }
  }

  CUTE_DEVICE void store(float* partial, Out const& out) const {
    for_quads(partial, [&](int m, int d, Quad& quad) {
      auto const& o = out.acc_o.block(m, d);
      quad = {{o[0], o[1], o[2], o[3]}};
    });
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (place.warp_n() == 0 && place.column(0) == 0) *row(partial, i) = out.softmax.rows[i];
    }
  }

  // Merges `count` results, every step-th from split `first` on.
  CUTE_DEVICE void merge(Out& out, int first, int step, int count) const {
    int const end = first + step * count;
    SoftmaxRow(&rows)[kRows] = out.softmax.rows;
    for (int i = 0; i < kRows; ++i) rows[i] = {};
    for (int n = first; n < end; n += step) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) rows[i].max = fmaxf(rows[i].max, row(partial(n), i)->max);
    }
    // The row max is known, so no part waits for another.
    clear(out.acc_o);
    for (int n = first; n < end; n += step) {
      float factors[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) rows[i].merge(*row(partial(n), i), 1.0f, factors[i]);
      for_quads(partial(n), [&](int m, int d, Quad const& quad) {
        auto& o = out.acc_o.block(m, d);
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) o[e] = fmaf(quad.values[e], factors[2 * m + e / 2], o[e]);
      });
    }
  }
};

}  // namespace cutlass_attn
