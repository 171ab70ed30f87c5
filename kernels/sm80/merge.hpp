// What the warps of a block found of the same rows, put together.
#pragma once

#include "cute/fragment.hpp"
#include "cute/softmax.hpp"
#include "sm80/config.hpp"

namespace cutlass_attn::sm80 {

// Joins O and the softmax state of all key groups in those of group 0. They pass through shared
// memory, which nobody uses for anything else by then, each value at a place of its own that only
// the same thread of group 0 reads:
//
//   [group - 1][value][thread]   values: O, then max and sum of every row
template <class Config, class Arch, class Loop>
CUTE_DEVICE void merge_key_groups(Loop& loop, char* smem) {
  constexpr int kThreads = Config::kGroupThreads, kRows = Loop::kRows;
  constexpr int kOutputs = decltype(size(loop.acc_o))::value;
  constexpr int kValues = kOutputs + 2 * kRows;
  static_assert((Config::kKeyGroups - 1) * kValues * kThreads * sizeof(float) <=
                Config::kBufferBytes);
  float* const values = reinterpret_cast<float*>(smem) + loop.group_thread;

  Arch::sync();  // Q, K and V are read by none any more
  if (loop.group > 0) {
    float* const mine = values + (loop.group - 1) * kValues * kThreads;
    CUTE_UNROLL
    for (int i = 0; i < kOutputs; ++i) mine[i * kThreads] = loop.acc_o(i);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      mine[(kOutputs + 2 * i) * kThreads] = loop.softmax.rows[i].max;
      mine[(kOutputs + 2 * i + 1) * kThreads] = loop.softmax.rows[i].sum;
    }
  }
  Arch::sync();
  if (loop.group > 0) return;

  Tensor o_rows = as_rows(loop.acc_o);
  for (int group = 1; group < Config::kKeyGroups; ++group) {
    float const* const theirs = values + (group - 1) * kValues * kThreads;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      SoftmaxRow const row{theirs[(kOutputs + 2 * i) * kThreads],
                           theirs[(kOutputs + 2 * i + 1) * kThreads]};
      float factor;
      float const mine = loop.softmax.rows[i].merge(row, 1.0f, factor);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(o_rows); ++j) {
        int const index = o_rows.layout()(i, j);
        o_rows(i, j) = o_rows(i, j) * mine + theirs[index * kThreads] * factor;
      }
    }
  }
}

// Completes the sums of rows that several warps share: each has weighed its own keys, relative to
// the same reference. Through shared memory again, (column warp, row).
template <class Config, class Arch, class Loop>
CUTE_DEVICE void merge_sums(Loop& loop, char* smem) {
  static_assert(Config::kColumnWarps * Config::kBlockM * sizeof(float) <= Config::kBufferBytes);
  float* const sums = reinterpret_cast<float*>(smem);
  Arch::sync();  // K, V and P are read by none any more
  // One of the four threads of a warp that share a row.
  if (loop.column(0) == 0) {
    CUTE_UNROLL
    for (int i = 0; i < Loop::kRows; ++i) {
      sums[loop.column_warp() * Config::kBlockM + loop.row(i)] = loop.softmax.rows[i].sum;
    }
  }
  Arch::sync();  // all sums are there
  CUTE_UNROLL
  for (int i = 0; i < Loop::kRows; ++i) {
    float sum = sums[loop.row(i)];
    CUTE_UNROLL
    for (int c = 1; c < Config::kColumnWarps; ++c) sum += sums[c * Config::kBlockM + loop.row(i)];
    loop.softmax.rows[i].sum = sum;
  }
}

}  // namespace cutlass_attn::sm80
