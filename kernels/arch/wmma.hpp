// nvcuda::wmma, kM x kN x 16, fp16 with fp32 accumulators: a warp's matrices as fragments whose
// elements are in lanes that nobody may name. Fragments of one type have theirs in the same.
//
// Which lane of a warp holds which element of a fragment is documented nowhere, and differs between
// GPUs. The host twin scatters elements over the lanes like none of them does, so that a kernel
// that relies on where one is gets wrong numbers. A load or a store is each lane's own accesses to
// memory, at the lane's own time: what another lane wrote before has to be ordered by a barrier.
#pragma once

#include "arch/twins.hpp"

#if defined(CA_DEVICE_TWIN)
#include <mma.h>
#endif

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

template <int kM, int kN>
struct Wmma {
  using RowMajor = nvcuda::wmma::row_major;
  using ColMajor = nvcuda::wmma::col_major;
  using A = nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, kM, kN, 16, __half, RowMajor>;
  template <class Order>
  using B = nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, kM, kN, 16, __half, Order>;
  using Accumulator = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, kM, kN, 16, float>;

  CUTE_DEVICE static void fill(Accumulator& c, float value) {
    nvcuda::wmma::fill_fragment(c, value);
  }

  template <class Fragment>  // A or B
  CUTE_DEVICE static void load(Fragment& x, cutlass::half_t const* from, int ld) {
    nvcuda::wmma::load_matrix_sync(x, reinterpret_cast<__half const*>(from), unsigned(ld));
  }
  CUTE_DEVICE static void load(Accumulator& c, float const* from, int ld) {
    nvcuda::wmma::load_matrix_sync(c, from, unsigned(ld), nvcuda::wmma::mem_row_major);
  }
  CUTE_DEVICE static void store(float* to, Accumulator const& c, int ld) {
    nvcuda::wmma::store_matrix_sync(to, c, unsigned(ld), nvcuda::wmma::mem_row_major);
  }

  template <class Order>
  CUTE_DEVICE static void mma(Accumulator& c, A const& a, B<Order> const& b) {
    nvcuda::wmma::mma_sync(c, a, b, c);
  }
};

#else

template <int kM, int kN>
struct Wmma {
  static constexpr int kK = 16;
  struct RowMajor {};
  struct ColMajor {};

  // Element i of a lane is element simt::engine::wmma_element() of the matrix, counted along its
  // rows.
  template <class T, int kRows, int kColumns, class Order>
  struct Fragment {
    static constexpr int num_elements = kRows * kColumns / simt::kWarpSize;
    T x[num_elements];

    // Offset of element i of this lane in a matrix whose rows, or columns, are `ld` apart.
    static int offset(int i, int ld) {
      int const at = simt::engine::wmma_element(i, kRows * kColumns);
      int const row = at / kColumns, column = at % kColumns;
      return std::is_same_v<Order, RowMajor> ? row * ld + column : column * ld + row;
    }
    // Reports addresses and leading dimensions that the instruction does not take.
    static void check(char const* what, T const* matrix, int ld) {
      constexpr bool kByRows = std::is_same_v<Order, RowMajor>;
      simt::engine::check_matrix(what, matrix, ld, kByRows ? kRows : kColumns,
                                 kByRows ? kColumns : kRows, sizeof(T));
    }
  };
  using A = Fragment<cutlass::half_t, kM, kK, RowMajor>;
  template <class Order>
  using B = Fragment<cutlass::half_t, kK, kN, Order>;
  using Accumulator = Fragment<float, kM, kN, RowMajor>;

  static void fill(Accumulator& c, float value) {
    for (float& x : c.x) x = value;
  }

  template <class T, int kRows, int kColumns, class Order>
  static void load(Fragment<T, kRows, kColumns, Order>& x, T const* from, int ld) {
    x.check("load_matrix_sync", from, ld);
    for (int i = 0; i < x.num_elements; ++i) x.x[i] = from[x.offset(i, ld)];
  }
  static void store(float* to, Accumulator const& c, int ld) {
    c.check("store_matrix_sync", to, ld);
    for (int i = 0; i < c.num_elements; ++i) to[c.offset(i, ld)] = c.x[i];
  }

  template <class Order>
  static void mma(Accumulator& c, A const& a, B<Order> const& b) {
    uint16_t a_bits[A::num_elements], b_bits[B<Order>::num_elements];
    std::memcpy(a_bits, a.x, sizeof(a_bits));
    std::memcpy(b_bits, b.x, sizeof(b_bits));
    simt::engine::wmma(kM, kN, c.x, a_bits, b_bits);
  }
};

#endif

}  // namespace cutlass_attn::arch
