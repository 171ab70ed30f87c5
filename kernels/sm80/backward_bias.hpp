// The gradient of a bias: gradients of its logits, added in fp32 by atomics, in any order of the
// blocks. BackwardBeforeBias has zeroed it.
#pragma once

#include "core/opaque.hpp"
#include "tile/backward_scores.hpp"

namespace cutlass_attn::sm80 {

// Adds x = P (dP - delta) of a slice. If queries or keys share an entry (a broadcast dimension),
// their sum is reduced first: within the thread, then over the four lanes with equal keys, or the
// eight lanes with equal queries.
template <class Scores>
CUTE_DEVICE void add_to_bias(PerLogit const& to, typename Scores::Slice& x, StepPlace const& at,
                             int slice, Scores const& scores, int lane) {
  using Arch = typename Scores::Machine;
  constexpr int kKeyBlocks = Scores::kKeyBlocks, kQueryColumns = Scores::kQueryColumns;
  bool const has_queries = to.row_stride != 0, has_keys = to.key_stride != 0;
  Scores::for_all([&](int m, int n, int i) { x(i, m, n) *= scores.dropout.kept_scale; });
  unpredicated_if(!has_queries, [&] {
    CUTE_UNROLL
    for (int m = 0; m < kKeyBlocks; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float sum = 0.0f;
        CUTE_UNROLL
        for (int n = 0; n < kQueryColumns; ++n) sum += x(2 * half, m, n) + x(2 * half + 1, m, n);
        sum += Arch::shuffle_xor(sum, 1);
        x(2 * half, m, 0) = sum + Arch::shuffle_xor(sum, 2);
      }
    }
  });
  unpredicated_if(!has_keys, [&] {
    CUTE_UNROLL
    for (int n = 0; n < kQueryColumns; ++n) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        float sum = 0.0f;
        CUTE_UNROLL
        for (int m = 0; m < kKeyBlocks; ++m) sum += x(j, m, n) + x(2 + j, m, n);
        sum += Arch::shuffle_xor(sum, 4);
        sum += Arch::shuffle_xor(sum, 8);
        x(j, 0, n) = sum + Arch::shuffle_xor(sum, 16);
      }
    }
  });

  SlicePlace const place{opaque(lane)};
  SeqLens const& lens = scores.score.seqlens;
  int const first_query = at.first_query + slice * kQueryColumns * 8;
  int const queries = has_queries ? lens.q - first_query : 1;
  int const keys = has_keys ? lens.k - at.first_key : 1;
  float* const first = static_cast<float*>(const_cast<void*>(to.data)) +
                       at.batch * to.batch_stride + at.head * to.head_stride +
                       first_query * to.row_stride + at.first_key * to.key_stride;
  CUTE_UNROLL
  for (int n = 0; n < kQueryColumns; ++n) {
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      int const query = place.query(n, j);
      float* const row = first + query * to.row_stride;
      CUTE_UNROLL
      for (int m = 0; m < kKeyBlocks; ++m) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          int const key = place.key(m, 2 * half);
          if (query < queries && key < keys) {
            Arch::red_add(row + key * to.key_stride, x(2 * half + j, m, n));
          }
        }
      }
    }
  }
}

}  // namespace cutlass_attn::sm80
