// A thread's part of a matrix in m16n8 blocks, the accumulator layout of mma.sync and wgmma:
// registers, conversions, and the rows and columns of the elements.
#pragma once

#include <cutlass/numeric_types.h>
#include <type_traits>

#include "core/math.hpp"

namespace cutlass_attn {

// kM x kN blocks of m16n8. In each block a thread holds rows g and g + 8, and in both rows kWide
// neighbouring columns: two, or one if an element is a word of two columns.
template <class T, int kM_, int kN_, int kWide_ = 2>
struct Fragment {
  static constexpr int kM = kM_, kN = kN_, kWide = kWide_;
  static constexpr int kBlockSize = 2 * kWide;
  static constexpr int kSize = kBlockSize * kM * kN;
  using Block = T[kBlockSize];  // (column, row half)

  T x[kSize];  // (column, row half, m, n), the first index fastest

  CUTE_HOST_DEVICE T& operator()(int i) { return x[i]; }
  CUTE_HOST_DEVICE T const& operator()(int i) const { return x[i]; }
  CUTE_HOST_DEVICE T& operator()(int i, int m, int n) { return x[index(i, m, n)]; }
  CUTE_HOST_DEVICE T const& operator()(int i, int m, int n) const { return x[index(i, m, n)]; }
  CUTE_HOST_DEVICE Block& block(int m, int n) {
    return reinterpret_cast<Block&>(x[index(0, m, n)]);
  }
  CUTE_HOST_DEVICE Block const& block(int m, int n) const {
    return reinterpret_cast<Block const&>(x[index(0, m, n)]);
  }

 private:
  CUTE_HOST_DEVICE static constexpr int index(int i, int m, int n) {
    return i + kBlockSize * (m + kM * n);
  }
};

template <class T, int kM, int kN, int kWide>
CUTE_DEVICE void clear(Fragment<T, kM, kN, kWide>& fragment) {
  CUTE_UNROLL
  for (int i = 0; i < fragment.kSize; ++i) fragment.x[i] = T(0);
}

// View of a fragment as a matrix of the thread's rows and columns. F: Fragment, const or not.
template <class F>
struct FragmentRows {
  static constexpr int kRows = 2 * F::kM, kColumns = F::kWide * F::kN, kSize = F::kSize;
  F& fragment;

  CUTE_HOST_DEVICE auto& operator()(int row, int column) const {
    int const i = column % F::kWide + row % 2 * F::kWide;
    return fragment(i, row / 2, column / F::kWide);
  }
  CUTE_HOST_DEVICE auto& operator()(int i) const { return (*this)(i % kRows, i / kRows); }
};
template <class F>
CUTE_DEVICE FragmentRows<F> as_rows(F& fragment) {
  return {fragment};
}
// Rows and columns of a view, or of a reference to it.
template <class S>
inline constexpr int rows_of = std::decay_t<S>::kRows;
template <class S>
inline constexpr int columns_of = std::decay_t<S>::kColumns;

// Bits of an Element to float.
template <class Element>
CUTE_DEVICE float element_to_float(uint16_t bits) {
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return half_to_float(bits);
  } else {
    return bfloat16_to_float(bits);
  }
}

// Copy of a fragment in fp32.
template <class T, int kM, int kN>
CUTE_DEVICE Fragment<float, kM, kN> to_float(Fragment<T, kM, kN> const& from) {
  Fragment<float, kM, kN> to;
  CUTE_UNROLL
  for (int i = 0; i < to.kSize; ++i) to.x[i] = float(from.x[i]);
  return to;
}

// A fragment rounded to nearest even, two neighbouring columns per word.
template <class Arch, class Element, int kM, int kN>
CUTE_DEVICE Fragment<uint32_t, kM, kN, 1> pack_columns(Fragment<float, kM, kN> const& from) {
  Fragment<uint32_t, kM, kN, 1> to;
  CUTE_UNROLL
  for (int i = 0; i < to.kSize; ++i) {
    to.x[i] = Arch::template pack<Element>(from.x[2 * i], from.x[2 * i + 1]);
  }
  return to;
}

// Transposes 4 x 4 words over four threads that are kStep lanes apart: thread `lane` of them
// receives word `lane` of every thread.
template <class Arch, int kStep>
CUTE_DEVICE void transpose_four(uint32_t (&words)[4], int lane) {
  CUTE_UNROLL
  for (int bit = 1; bit < 4; bit *= 2) {
    bool const is_odd = (lane & bit) != 0;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t const got = Arch::shuffle_xor(is_odd ? words[i] : words[i + bit], bit * kStep);
      words[i] = is_odd ? got : words[i];
      words[i + bit] = is_odd ? words[i + bit] : got;
    }
  }
}

// transpose_four() over a quad. If a word is two columns of an m16n8 block, a thread afterwards
// holds eight columns of one block.
template <class Arch>
CUTE_DEVICE void transpose_quad(uint32_t (&words)[4], int lane) {
  transpose_four<Arch, 1>(words, lane);
}

// Position of element (i, j) of as_rows() in the tile of a thread block. m16 blocks go to the
// kWarpsM warps along M in turn; the kWarpsN warps along N share each of them.
template <int kWarpsM, int kWarpsN>
struct FragmentPlace {
  int thread;

  CUTE_DEVICE int warp_m() const { return thread / 32 / kWarpsN; }
  CUTE_DEVICE int warp_n() const { return thread / 32 % kWarpsN; }

  // Row of the tile.
  CUTE_DEVICE int row(int i) const {
    return warp_m() * 16 + thread % 32 / 4 + i % 2 * 8 + i / 2 * (16 * kWarpsM);
  }
  // Column within the warp's columns: a key of its key block, or a head-dim column.
  CUTE_DEVICE int column(int j) const { return thread % 4 * 2 + step(j); }
  // From column(0) to column(j).
  CUTE_DEVICE static constexpr int step(int j) { return j % 2 + j / 2 * 8; }
  // Bit mask of a thread's first 32 columns: bit j is set if column(j) < `end`.
  CUTE_DEVICE uint32_t columns_before(int end) const {
    int const beyond = end - thread % 4 * 2, in_8 = beyond & 7;
    int const count = beyond < 0 ? 0 : beyond / 8 * 2 + (in_8 < 2 ? in_8 : 2);
    return count < 32 ? (1u << count) - 1 : ~0u;
  }
};

}  // namespace cutlass_attn
