// The gradient of a bias: dS of a step, as it is rounded for dQ and dK, in fp32.
//
// dS has keys in rows. movmatrix turns 8 queries and 8 keys at a time, so that a lane has two
// neighbouring keys of a query, and four lanes a sector of 32 bytes.
//
// Where no dimension of the bias is broadcast, each entry is stored once. Otherwise blocks add to
// it, in any order. BackwardBeforeBias has zeroed it, because blocks leave out what is masked.
#pragma once

#include "sm80/backward_scores.hpp"

namespace cutlass_attn::sm90 {

template <class Element, class Arch>
struct BiasGrad {
  Problem const& p;
  PerLogit const& to;
  float const scale;  // of dS

  // The dS of 16 keys of this warp, and all queries of the step.
  //   words: of 16 queries and 16 keys, as Products::pack() makes them
  template <int kSteps>
  CUTE_DEVICE void add(uint32_t const (&words)[kSteps][1][4], sm80::StepPlace const& at,
                       SeqLens const& lens, int lane) const {
    int const query = at.first_query + lane / 4, key = at.first_key + lane % 4 * 2;
    float* row = static_cast<float*>(const_cast<void*>(to.data)) + at.batch * to.batch_stride +
                 at.head * to.head_stride + query * to.row_stride + key;
    bool const has_rows = to.row_stride != 0, is_alone = has_one_writer();
    float sums[2][2] = {};  // over the queries
    CUTE_UNROLL
    for (int n = 0; n < 2 * kSteps; ++n) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t const word = Arch::transpose(words[n / 2][0][n % 2 * 2 + half]);
        float const x[2] = {to_float(uint16_t(word)) * scale, to_float(word >> 16) * scale};
        if (has_rows) {
          bool const is_inside = query + n * 8 < lens.q && key + half * 8 < lens.k;
          if (is_inside) write(row + half * 8, x, is_alone);
        } else {
          sums[half][0] += x[0], sums[half][1] += x[1];
        }
      }
      row += 8 * to.row_stride;
    }
    if (has_rows) return;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        sums[half][0] += Arch::shuffle_xor(sums[half][0], lanes);
        sums[half][1] += Arch::shuffle_xor(sums[half][1], lanes);
      }
      if (lane < 4 && key + half * 8 < lens.k) write(row + half * 8, sums[half], false);
    }
  }

 private:
  CUTE_DEVICE static float to_float(uint16_t bits) {
    return std::is_same_v<Element, cutlass::half_t> ? half_to_float(bits) : bfloat16_to_float(bits);
  }
  CUTE_DEVICE bool has_one_writer() const {
    return to.row_stride != 0 && (to.head_stride != 0 || p.num_heads_q == 1) &&
           (to.batch_stride != 0 || p.batch == 1);
  }
  CUTE_DEVICE static void write(float* to, float const (&x)[2], bool is_alone) {
    if (is_alone) {
      *reinterpret_cast<Pair*>(to) = Pair{x[0], x[1]};
    } else {
      Arch::add(to, x);
    }
  }
  struct alignas(8) Pair {
    float x, y;
  };
};

}  // namespace cutlass_attn::sm90
