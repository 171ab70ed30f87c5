// Register fragments of m16n8k16: views, conversions, and which rows and columns a thread has.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>
#include <type_traits>

#include "core/math.hpp"
#include "simt/numeric_conversion.hpp"

namespace cutlass_attn {

// An accumulator ((2, 2), M, N) of m16n8 atoms, seen as a matrix of the thread's rows and columns:
//
//   ((column pair, row half), M, N)  ->  ((row half, M), (column pair, N))
template <class Fragment>
CUTE_DEVICE auto as_rows(Fragment&& acc) {
  using namespace cute;
  auto const l = acc.layout();
  return make_tensor(acc.data(), make_layout(make_layout(get<0, 1>(l), get<1>(l)),
                                             make_layout(get<0, 0>(l), get<2>(l))));
}

// The number whose Element has these bits.
template <class Element>
CUTE_DEVICE float element_to_float(uint16_t bits) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return half_to_float(bits);
  } else {
    return bfloat16_to_float(bits);
  }
}

// A fragment of the same layout in another element type, rounded to nearest even.
template <class Element, class Fragment>
CUTE_DEVICE auto convert_to(Fragment const& from) {
  using namespace cute;
  using From = typename Fragment::value_type;
  constexpr int kSize = decltype(size(from))::value;
  auto to = make_tensor_like<Element>(from);
  cutlass::NumericArrayConverter<Element, From, kSize> convert;
  auto const& in = *reinterpret_cast<cutlass::Array<From, kSize> const*>(from.data());
  *reinterpret_cast<cutlass::Array<Element, kSize>*>(raw_pointer_cast(to.data())) = convert(in);
  return to;
}

// Of the four words that each thread of a quad has, thread i (its `lane`) gets the i-th of every
// thread: where a word is two columns of an m16n8 block, eight columns of one block.
template <class Arch>
CUTE_DEVICE void transpose_quad(uint32_t (&words)[4], int lane) {
  CUTE_UNROLL
  for (int bit = 1; bit < 4; bit *= 2) {
    bool const is_odd = (lane & bit) != 0;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t const got = Arch::shuffle_xor(is_odd ? words[i] : words[i + bit], bit);
      words[i] = is_odd ? got : words[i];
      words[i + bit] = is_odd ? words[i + bit] : got;
    }
  }
}

// Where element (i, j) of as_rows() is in a block's tile, with kWarpsM warps along M that have m16
// blocks in turn, and each of them kWarpsN warps along N.
template <int kWarpsM, int kWarpsN>
struct FragmentPlace {
  int thread;

  CUTE_DEVICE int warp_m() const { return thread / 32 / kWarpsN; }
  CUTE_DEVICE int warp_n() const { return thread / 32 % kWarpsN; }

  // Row of the tile.
  CUTE_DEVICE int row(int i) const {
    return warp_m() * 16 + thread % 32 / 4 + i % 2 * 8 + i / 2 * (16 * kWarpsM);
  }
  // Column of the warp's share: a key of its key block, or a head-dim column.
  CUTE_DEVICE int column(int j) const { return thread % 4 * 2 + j % 2 + j / 2 * 8; }
  // A bit for each of a thread's first 32 columns, the j-th for column(j): is it before end?
  CUTE_DEVICE uint32_t columns_before(int end) const {
    int const beyond = end - thread % 4 * 2, in_8 = beyond & 7;
    int const count = beyond < 0 ? 0 : beyond / 8 * 2 + (in_8 < 2 ? in_8 : 2);
    return count < 32 ? (1u << count) - 1 : ~0u;
  }
};

}  // namespace cutlass_attn
