// wgmma: products of a warpgroup, 64 x N x 16, which run beside it; B in shared memory, A there or
// in registers. Accumulators are those of m16n8 side by side: warp w has the rows [16 w, 16 w +
// 16).
//
// Between wgmma_fence() and the wgmma_wait() that covers a product, nobody touches its accumulators
// and its registers of A, and nobody overwrites what it reads in shared memory.
#pragma once

#include <utility>

#include "arch/twins.hpp"

#if defined(CA_DEVICE_TWIN)
#include <cute/arch/mma_sm90_gmma.hpp>
#endif

namespace cutlass_attn::arch {

// Where wgmma finds an operand in shared memory, in tiles that TMA swizzled by 128 bytes. In fields
// of 16 bytes: an address, the leading and the stride byte offset. Adding n adds 16 n bytes to the
// address.
using MatrixDescriptor = uint64_t;

CUTE_HOST_DEVICE constexpr MatrixDescriptor matrix_descriptor(uint32_t address, int leading_bytes,
                                                              int stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return kSwizzle128 | uint64_t(stride_bytes / 16) << 32 | uint64_t(leading_bytes / 16) << 16 |
         (address & 0x3ffff) / 16;
}

#if defined(CA_DEVICE_TWIN)

namespace detail {
template <class Element, int kN>
struct Gmma;
#define CA_GMMA(Type, name, n)                                                         \
  template <>                                                                          \
  struct Gmma<Type, n> {                                                               \
    using Major = cute::SM90::GMMA::Major;                                             \
    using SS = cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_SS<Major::K, Major::K>;   \
    using RS = cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_RS<Major::K, Major::MN>;  \
    using TS = cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_SS<Major::MN, Major::MN>; \
  };
#define CA_GMMA_OF_TYPES(n)           \
  CA_GMMA(cutlass::half_t, F16F16, n) \
  CA_GMMA(cutlass::bfloat16_t, BF16BF16, n)
CA_GMMA_OF_TYPES(32)
CA_GMMA_OF_TYPES(64)
CA_GMMA_OF_TYPES(96)
CA_GMMA_OF_TYPES(128)
CA_GMMA_OF_TYPES(192)
CA_GMMA_OF_TYPES(256)
#undef CA_GMMA_OF_TYPES
#undef CA_GMMA
}  // namespace detail

struct Wgmma {
  // Of an operand whose tile begins at `tile`.
  CUTE_DEVICE static MatrixDescriptor descriptor(void const* tile, int leading_bytes,
                                                 int stride_bytes) {
    return matrix_descriptor(shared_address(tile), leading_bytes, stride_bytes);
  }

  // acc = a b^T, added to acc where `accumulates`: rows of both in shared memory, columns
  // contiguous.
  template <class Element, int kSize>
  CUTE_DEVICE static void wgmma_ss(float (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                                   bool accumulates) {
    using Atom = typename detail::Gmma<Element, 2 * kSize>::SS;
    ss<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }
  // acc = a^T b, added to acc where `accumulates`: rows of both in shared memory, columns
  // contiguous, of which A has 64.
  template <class Element, int kSize>
  CUTE_DEVICE static void wgmma_ts(float (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                                   bool accumulates) {
    using Atom = typename detail::Gmma<Element, 2 * kSize>::TS;
    ss<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }
  // acc = a b, added to acc where `accumulates`: A in registers as for mma.m16n8k16, rows of B in
  // shared memory, its columns contiguous.
  template <class Element, int kSize>
  CUTE_DEVICE static void wgmma_rs(float (&acc)[kSize], uint32_t const (&a)[4], MatrixDescriptor b,
                                   bool accumulates) {
    using Atom = typename detail::Gmma<Element, 2 * kSize>::RS;
    rs<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }

  // What this thread did to these registers comes before the products that follow.
  template <class... Arrays>
  CUTE_DEVICE static void wgmma_fence(Arrays&... arrays) {
    (pin(arrays), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  }
  CUTE_DEVICE static void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  // All but the newest `kPending` committed groups are done, and these registers are theirs.
  template <int kPending, class... Arrays>
  CUTE_DEVICE static void wgmma_wait(Arrays&... arrays) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    (pin(arrays), ...);
  }

  // What this thread stored in shared memory is there for products that come after a barrier.
  CUTE_DEVICE static void async_proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  // Gives registers of every thread of the warpgroup back, or takes some.
  template <int kRegisters>
  CUTE_DEVICE static void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
  template <int kRegisters>
  CUTE_DEVICE static void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }

 private:
  // The compiler moves nothing that concerns them across.
  template <class T>
  CUTE_DEVICE static void pin(T& x) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(x)::"memory");
    } else if constexpr (std::is_same_v<T, uint32_t>) {
      asm volatile("" : "+r"(x)::"memory");
    } else {
      CUTE_UNROLL
      for (int i = 0; i < int(sizeof(x) / sizeof(x[0])); ++i) pin(x[i]);
    }
  }
  CUTE_DEVICE static cute::SM90::GMMA::ScaleOut scale(bool accumulates) {
    using cute::SM90::GMMA::ScaleOut;
    return accumulates ? ScaleOut::One : ScaleOut::Zero;
  }
  template <class Atom, int kSize, int... kI>
  CUTE_DEVICE static void ss(float (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                             cute::SM90::GMMA::ScaleOut scale, std::integer_sequence<int, kI...>) {
    Atom::fma(a, b, acc[kI]..., scale);
  }
  template <class Atom, int kSize, int... kI>
  CUTE_DEVICE static void rs(float (&acc)[kSize], uint32_t const (&a)[4], MatrixDescriptor b,
                             cute::SM90::GMMA::ScaleOut scale, std::integer_sequence<int, kI...>) {
    Atom::fma(a[0], a[1], a[2], a[3], b, acc[kI]..., scale);
  }
};

#else

struct Wgmma {
  static MatrixDescriptor descriptor(void const* tile, int leading_bytes, int stride_bytes) {
    return matrix_descriptor(simt::engine::smem_offset(tile), leading_bytes, stride_bytes);
  }
  template <class Element, int kSize>
  static void wgmma_ss(float (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                       bool accumulates) {
    simt::engine::wgmma({input<Element>(), 2 * kSize, accumulates, nullptr, a, b}, acc);
  }
  template <class Element, int kSize>
  static void wgmma_ts(float (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                       bool accumulates) {
    simt::engine::wgmma({input<Element>(), 2 * kSize, accumulates, nullptr, a, b, true}, acc);
  }
  template <class Element, int kSize>
  static void wgmma_rs(float (&acc)[kSize], uint32_t const (&a)[4], MatrixDescriptor b,
                       bool accumulates) {
    simt::engine::wgmma({input<Element>(), 2 * kSize, accumulates, a, 0, b}, acc);
  }
  template <class... Arrays>
  static void wgmma_fence(Arrays&...) {
    simt::engine::wgmma_fence();
  }
  static void wgmma_commit() { simt::engine::wgmma_commit(); }
  template <int kPending, class... Arrays>
  static void wgmma_wait(Arrays&...) {
    simt::engine::wgmma_wait(kPending);
  }
  static void async_proxy_fence() { simt::engine::async_proxy_fence(); }
  template <int kRegisters>
  static void registers_decrease() {
    simt::engine::set_registers(kRegisters);
  }
  template <int kRegisters>
  static void registers_increase() {
    simt::engine::set_registers(kRegisters);
  }

 private:
  template <class Element>
  static constexpr simt::engine::MmaInput input() {
    static_assert(is_16_bit<Element>);
    return std::is_same_v<Element, cutlass::half_t> ? simt::engine::MmaInput::kFloat16
                                                    : simt::engine::MmaInput::kBFloat16;
  }
};

#endif

}  // namespace cutlass_attn::arch
