// nvcuda::wmma as Device::Wmma, for GPU code. A header of its own, because <mma.h> comes with other
// packages of CUDA than the headers every kernel needs.
#pragma once

#if defined(__CUDACC__)

#include <mma.h>

#include "simt/device.hpp"

namespace cutlass_attn::simt {

template <int kM, int kN>
struct DeviceWmma {
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

}  // namespace cutlass_attn::simt

#endif
