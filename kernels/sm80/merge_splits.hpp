// Partial results of forward blocks that share the keys of a tile of rows, and their merge by the
// last block.
#pragma once

#include "sm80/key_splits.hpp"
#include "sm80/operands.hpp"

namespace cutlass_attn::sm80 {

// Thread t of the last block has the rows and columns of thread t of every other block. So
// fragments of O go through global memory unchanged, in vectors of 16 bytes that neighbouring
// threads write to neighbouring addresses.
template <class Config, class Score, class Arch>
struct SplitMerge {
  using Out = Result<Config, Score, Arch>;
  static constexpr int64_t kFloats = KeySplits::partial_floats(Config::kBlockM, Config::kHeadDimV);
  static constexpr int kRows = Config::kRows;

  struct alignas(16) Quad {  // of an m16n8 block: two columns of two rows
    float values[4];
  };

  KeySplits const& splits;
  typename Config::Place const& place;
  int const unit = splits.unit(Arch::block());

  // Stores this block's result. Returns true in the last block of its tile of rows, which then has
  // the result of all, merged in the order of the keys. ticket: shared memory that the main loop no
  // longer uses.
  CUTE_DEVICE bool run(Out& out, int32_t& ticket) const {
    store(partial(splits.split(Arch::block())), out);
    if (!splits.template is_last<Arch>(unit, ticket)) return false;
    merge(out);
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
    constexpr int kColumns = Config::kHeadDimV / 8;
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
      if (place.column(0) == 0) *row(partial, i) = out.softmax.rows[i];
    }
  }

  CUTE_DEVICE void merge(Out& out) const {
    SoftmaxRow(&rows)[kRows] = out.softmax.rows;
    for (int i = 0; i < kRows; ++i) rows[i] = {};
    for (int n = 0; n < splits.count; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) rows[i].max = fmaxf(rows[i].max, row(partial(n), i)->max);
    }
    // The row max is known, so that no part waits for another one.
    clear(out.acc_o);
    for (int n = 0; n < splits.count; ++n) {
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

}  // namespace cutlass_attn::sm80
