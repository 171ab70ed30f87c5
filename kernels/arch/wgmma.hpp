// wgmma: asynchronous products of a warpgroup, 64 x N x 16, or 64 x N x 32 in 8 bits. B is in
// shared memory; A is in shared memory or in registers. An accumulator is a row of m16n8 blocks;
// warp w holds rows [16 w, 16 w + 16).
//
// Between wgmma_fence() and the wgmma_wait() that covers a product, no thread may access its
// accumulators or A registers, or overwrite its operands in shared memory.
#pragma once

#include <utility>

#include "arch/twins.hpp"

#if defined(CA_DEVICE_TWIN)
#include <cute/arch/mma_sm90_gmma.hpp>
#endif

namespace cutlass_attn::arch {

// Descriptor of an operand in shared memory, whose tiles have TMA's 128-byte swizzle. Its fields
// count 16 bytes: the address, the leading byte offset and the stride byte offset. Adding n to a
// descriptor adds 16 n bytes to the address.
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
    using RT = cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_RS<Major::K, Major::K>;   \
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

// 64 x 48, which CuTe has in a header of 20,000 lines: a b^T with A in shared memory or registers.
#define CA_D \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}"
#define CA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CA_ALL CA_FOUR(0), CA_FOUR(4), CA_FOUR(8), CA_FOUR(12), CA_FOUR(16), CA_FOUR(20)
template <class Element>
struct Gmma48;
#define CA_GMMA48(Type, name)                                                              \
  template <>                                                                              \
  struct Gmma48<Type> {                                                                    \
    CUTE_DEVICE static void ss(float (&d)[24], MatrixDescriptor a, MatrixDescriptor b,     \
                               int accumulates) {                                          \
      asm volatile(                                                                        \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"                                     \
          "wgmma.mma_async.sync.aligned.m64n48k16.f32." name "." name " " CA_D             \
          ", %24, %25, p, 1, 1, 0, 0;\n}\n"                                                \
          : CA_ALL                                                                         \
          : "l"(a), "l"(b), "r"(accumulates));                                             \
    }                                                                                      \
    CUTE_DEVICE static void rt(float (&d)[24], uint32_t const (&a)[4], MatrixDescriptor b, \
                               int accumulates) {                                          \
      asm volatile(                                                                        \
          "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"                                     \
          "wgmma.mma_async.sync.aligned.m64n48k16.f32." name "." name " " CA_D             \
          ", {%24,%25,%26,%27}, %28, p, 1, 1, 0;\n}\n"                                     \
          : CA_ALL                                                                         \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));         \
    }                                                                                      \
  };
CA_GMMA48(cutlass::half_t, "f16")
CA_GMMA48(cutlass::bfloat16_t, "bf16")
#undef CA_GMMA48
#undef CA_ALL
#undef CA_FOUR
#undef CA_D

template <int kN>
struct Gmma8;
#define CA_GMMA8(n)                                                       \
  template <>                                                             \
  struct Gmma8<n> {                                                       \
    using Int8SS = cute::SM90::GMMA::MMA_64x##n##x32_S32S8S8_SS_TN;       \
    using E4m3RS = cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_RS_TN<>; \
  };
CA_GMMA8(64)
CA_GMMA8(96)
CA_GMMA8(128)
#undef CA_GMMA8
}  // namespace detail

struct Wgmma {
  // Descriptor of the operand whose tile begins at `tile`.
  CUTE_DEVICE static MatrixDescriptor descriptor(void const* tile, int leading_bytes,
                                                 int stride_bytes) {
    return matrix_descriptor(shared_address(tile), leading_bytes, stride_bytes);
  }

  // acc = a b^T, or acc += a b^T if `accumulates`. Both operands are in shared memory, row-major.
  template <class Element, int kSize>
  CUTE_DEVICE static void wgmma_ss(float (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                                   bool accumulates) {
    using Atom = typename detail::Gmma<Element, 2 * kSize>::SS;
    ss<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }
  template <class Element>
  CUTE_DEVICE static void wgmma_ss(float (&acc)[24], MatrixDescriptor a, MatrixDescriptor b,
                                   bool accumulates) {
    detail::Gmma48<Element>::ss(acc, a, b, accumulates);
  }
  // acc = a b^T, or acc += a b^T if `accumulates`. A is in registers, in the layout of
  // mma.m16n8k16; B is in shared memory, row-major.
  template <class Element, int kSize>
  CUTE_DEVICE static void wgmma_rt(float (&acc)[kSize], uint32_t const (&a)[4], MatrixDescriptor b,
                                   bool accumulates) {
    using Atom = typename detail::Gmma<Element, 2 * kSize>::RT;
    rs<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }
  template <class Element>
  CUTE_DEVICE static void wgmma_rt(float (&acc)[24], uint32_t const (&a)[4], MatrixDescriptor b,
                                   bool accumulates) {
    detail::Gmma48<Element>::rt(acc, a, b, accumulates);
  }
  // acc = a^T b, or acc += a^T b if `accumulates`. Both operands are in shared memory, row-major; A
  // has 64 columns.
  template <class Element, int kSize>
  CUTE_DEVICE static void wgmma_ts(float (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                                   bool accumulates) {
    using Atom = typename detail::Gmma<Element, 2 * kSize>::TS;
    ss<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }
  // acc = a b, or acc += a b if `accumulates`. A is in registers, in the layout of mma.m16n8k16; B
  // is in shared memory, row-major.
  template <class Element, int kSize>
  CUTE_DEVICE static void wgmma_rs(float (&acc)[kSize], uint32_t const (&a)[4], MatrixDescriptor b,
                                   bool accumulates) {
    using Atom = typename detail::Gmma<Element, 2 * kSize>::RS;
    rs<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }

  // Products in 8 bits: acc = a b^T, or acc += a b^T if `accumulates`. B is in shared memory,
  // row-major. Of int8, A is there too; of e4m3, A is in registers as for mma.m16n8k32.
  template <int kSize>
  CUTE_DEVICE static void wgmma_int8(uint32_t (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                                     bool accumulates) {
    using Atom = typename detail::Gmma8<2 * kSize>::Int8SS;
    ss<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }
  template <int kSize>
  CUTE_DEVICE static void wgmma_e4m3(float (&acc)[kSize], uint32_t const (&a)[4],
                                     MatrixDescriptor b, bool accumulates) {
    using Atom = typename detail::Gmma8<2 * kSize>::E4m3RS;
    rs<Atom>(acc, a, b, scale(accumulates), std::make_integer_sequence<int, kSize>{});
  }

  // wgmma.fence: orders this thread's accesses to these registers before the following products.
  template <class... Arrays>
  CUTE_DEVICE static void wgmma_fence(Arrays&... arrays) {
    (pin(arrays), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  }
  CUTE_DEVICE static void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  // wgmma.wait_group: returns when all but the newest `kPending` committed groups are complete and
  // have written these registers.
  template <int kPending, class... Arrays>
  CUTE_DEVICE static void wgmma_wait(Arrays&... arrays) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    (pin(arrays), ...);
  }

  // fence.proxy.async: after this fence and a barrier, this thread's stores to shared memory are
  // visible to products.
  CUTE_DEVICE static void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  // setmaxnreg.dec and .inc: every thread of the warpgroup releases or acquires registers.
  template <int kRegisters>
  CUTE_DEVICE static void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
  template <int kRegisters>
  CUTE_DEVICE static void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }

 private:
  // Keeps the compiler from moving accesses to x across this point.
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
  template <class Atom, class T, int kSize, int... kI>
  CUTE_DEVICE static void ss(T (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                             cute::SM90::GMMA::ScaleOut scale, std::integer_sequence<int, kI...>) {
    Atom::fma(a, b, acc[kI]..., scale);
  }
  template <class Atom, class T, int kSize, int... kI>
  CUTE_DEVICE static void rs(T (&acc)[kSize], uint32_t const (&a)[4], MatrixDescriptor b,
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
  static void wgmma_rt(float (&acc)[kSize], uint32_t const (&a)[4], MatrixDescriptor b,
                       bool accumulates) {
    simt::engine::wgmma({input<Element>(), 2 * kSize, accumulates, a, 0, b, true}, acc);
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
  template <int kSize>
  static void wgmma_int8(uint32_t (&acc)[kSize], MatrixDescriptor a, MatrixDescriptor b,
                         bool accumulates) {
    simt::engine::wgmma({simt::engine::MmaInput::kInt8, 2 * kSize, accumulates, nullptr, a, b},
                        reinterpret_cast<float*>(acc));
  }
  template <int kSize>
  static void wgmma_e4m3(float (&acc)[kSize], uint32_t const (&a)[4], MatrixDescriptor b,
                         bool accumulates) {
    simt::engine::wgmma({simt::engine::MmaInput::kE4m3, 2 * kSize, accumulates, a, 0, b}, acc);
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
  static void fence_proxy_async() { simt::engine::fence_proxy_async(); }
  template <int kRegisters>
  static void setmaxnreg_dec() {
    simt::engine::setmaxnreg(kRegisters);
  }
  template <int kRegisters>
  static void setmaxnreg_inc() {
    simt::engine::setmaxnreg(kRegisters);
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
