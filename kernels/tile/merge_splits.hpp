// Partial results of forward blocks that share the keys of a tile of rows, and their merge by the
// last block.
#pragma once

#include "core/key_splits.hpp"
#include "core/softmax.hpp"
#include "core/vector.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn {

// Thread t of the last block has the rows and columns of thread t of every other block. So
// fragments of O go through global memory unchanged, in vectors of 16 bytes that neighbouring
// threads write to neighbouring addresses. Out has acc_o and softmax, as Result of
// sm80/operands.hpp.
//
// The last block reads them through a ring of kBufferBytes of shared memory, which the main loop no
// longer uses. Each thread waits for its own copies alone. One result at a time in registers would
// take the latency of L2 for each.
template <class Config, class Arch, class Out, int kBufferBytes>
struct SplitMerge {
  static constexpr int64_t kFloats = KeySplits::partial_floats(Config::kBlockM, Config::kHeadDimV);
  static constexpr int kRows = Config::kRows;
  static constexpr int kColumns = Config::kWarpColumns / 8;
  static constexpr int kBlocks = Config::kRowBlocks * kColumns;  // m16n8, of a thread

  KeySplits const& splits;
  typename Config::Place const& place;
  char* const buffer;
  int const unit = splits.unit(Arch::block());
  int const split = splits.split(Arch::block());

  // Stores this block's result. Returns true in the last block of its tile of rows, which then has
  // the result of all blocks, merged in key order. ticket: shared memory that the main loop no
  // longer uses, and that is not in the buffer.
  CUTE_DEVICE bool run(Out& out, int32_t& ticket) const {
    store(partial(split), out);
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

  // The ring: kStages times kAtOnce m16n8 blocks of each thread.
  static constexpr int kAtOnce = 4, kCopies = kBlocks / kAtOnce;  // of a result
  static constexpr int kStageBytes = kAtOnce * Config::kThreads * int(sizeof(Quad));
  static constexpr int kStages = kBufferBytes / kStageBytes < 12 ? kBufferBytes / kStageBytes : 12;
  static_assert(kBlocks % kAtOnce == 0 && kStages >= 2);

  CUTE_DEVICE Quad* stage(int i) const {
    return reinterpret_cast<Quad*>(buffer + i * kStageBytes) + place.thread;
  }

  CUTE_DEVICE void store(float* partial, Out const& out) const {
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      auto const& o = out.acc_o.block(b / kColumns, b % kColumns);
      quads(partial)[b * Config::kThreads] = {{o[0], o[1], o[2], o[3]}};
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (place.warp_n() == 0 && place.column(0) == 0) *row(partial, i) = out.softmax.rows[i];
    }
  }

  // Merges the results of all splits.
  CUTE_DEVICE void merge(Out& out) const {
    int next = 0, next_copy = 0, to = 0;  // the next blocks to copy, and their stage
    auto const copy = [&] {
      if (next < splits.count) {
        Quad const* const from = quads(partial(next)) + next_copy * (kAtOnce * Config::kThreads);
        auto const target = Arch::smem_address(stage(to));
        CUTE_UNROLL
        for (int b = 0; b < kAtOnce; ++b) {
          Arch::cp_async(target + b * Config::kThreads * int(sizeof(Quad)),
                         from + b * Config::kThreads, true);
        }
      }
      Arch::cp_async_commit_group();
      to = to == kStages - 1 ? 0 : to + 1;
      next_copy = next_copy == kCopies - 1 ? 0 : next_copy + 1;
      if (next_copy == 0) ++next;
    };
    CUTE_NO_UNROLL
    for (int i = 0; i < kStages - 1; ++i) copy();

    SoftmaxRow(&rows)[kRows] = out.softmax.rows;
    for (int i = 0; i < kRows; ++i) rows[i] = {};
#pragma unroll 8
    for (int n = 0; n < splits.count; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) rows[i].max = fmaxf(rows[i].max, row(partial(n), i)->max);
    }
    // The row max is known, so no part waits for another.
    clear(out.acc_o);
    int at = 0;
    CUTE_NO_UNROLL
    for (int n = 0; n < splits.count; ++n) {
      float factors[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) rows[i].merge(*row(partial(n), i), 1.0f, factors[i]);
      CUTE_UNROLL
      for (int c = 0; c < kCopies; ++c) {
        Arch::template cp_async_wait_group<kStages - 2>();
        Quad const* const from = stage(at);
        CUTE_UNROLL
        for (int b = 0; b < kAtOnce; ++b) {
          int const m = (c * kAtOnce + b) / kColumns, d = (c * kAtOnce + b) % kColumns;
          Quad const quad = from[b * Config::kThreads];
          auto& o = out.acc_o.block(m, d);
          CUTE_UNROLL
          for (int e = 0; e < 4; ++e) o[e] = fmaf(quad.values[e], factors[2 * m + e / 2], o[e]);
        }
        at = at == kStages - 1 ? 0 : at + 1;
        copy();  // to the stage that was read before this one
      }
    }
  }
};

}  // namespace cutlass_attn
