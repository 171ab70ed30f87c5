// mma.sync.m16n8k16 as CuTe atoms, and m16n8k32 of int8 and e4m3. The host twins inherit from the
// device's atoms, and so do their traits: the layouts that a kernel is checked with are the ones
// the GPU is programmed with.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cute/atom/mma_atom.hpp>

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

namespace detail {
template <class Element, class Accumulator>
struct MmaAtom;
template <>
struct MmaAtom<cutlass::half_t, float> {
  using type = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct MmaAtom<cutlass::half_t, cutlass::half_t> {
  using type = cute::SM80_16x8x16_F16F16F16F16_TN;
};
template <>
struct MmaAtom<cutlass::bfloat16_t, float> {
  using type = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};
}  // namespace detail

#if defined(CA_DEVICE_TWIN)

struct Mma {
  // With accumulators in fp32, or in fp16 for operands in fp16.
  template <class Element, class Accumulator = float>
  using Mma16816 = typename detail::MmaAtom<Element, Accumulator>::type;

  // m16n8k32 of int8 with int32 accumulators: d = a b + c. A: of a, int8_t or uint8_t.
  template <class A>
  CUTE_DEVICE static void mma_int8(int32_t (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2],
                                   int32_t const (&c)[4]) {
    if constexpr (std::is_same_v<A, int8_t>) {
      asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%10, %11, %12, %13};"
          : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]),
            "r"(c[2]), "r"(c[3]));
    } else {
      static_assert(std::is_same_v<A, uint8_t>);
      asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%10, %11, %12, %13};"
          : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]),
            "r"(c[2]), "r"(c[3]));
    }
  }

  // m16n8k32 of e4m3 with fp16 accumulators: d = a b + c. Compute capability 8.9 and later; CUDA
  // 12.8 and later.
  CUTE_DEVICE static void mma_e4m3(uint32_t (&d)[2], uint32_t const (&a)[4], uint32_t const (&b)[2],
                                   uint32_t const (&c)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
        "{%8, %9};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]));
  }
};

#else

template <class Element, class Accumulator>
struct HostMma : detail::MmaAtom<Element, Accumulator>::type {
  static_assert(std::is_same_v<Accumulator, float> && is_16_bit<Element>);

  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t const& a0,
                  uint32_t const& a1, uint32_t const& a2, uint32_t const& a3, uint32_t const& b0,
                  uint32_t const& b1, float const& c0, float const& c1, float const& c2,
                  float const& c3) {
    using simt::engine::MmaInput;
    constexpr MmaInput kInput =
        std::is_same_v<Element, cutlass::half_t> ? MmaInput::kFloat16 : MmaInput::kBFloat16;
    float c[4] = {c0, c1, c2, c3};
    simt::engine::mma_m16n8k16(kInput, c, {a0, a1, a2, a3}, {b0, b1});
    d0 = c[0];
    d1 = c[1];
    d2 = c[2];
    d3 = c[3];
  }
};

// With fp16 accumulators: the accumulator and the 16 products are added up in fp32, and the sum is
// rounded to fp16, to nearest even, once. Hardware may round after the first eight products too:
// judge results by a rule that allows for both (python/cutlass_attn/testing.py).
template <>
struct HostMma<cutlass::half_t, cutlass::half_t>
    : detail::MmaAtom<cutlass::half_t, cutlass::half_t>::type {
  static void fma(uint32_t& d0, uint32_t& d1, uint32_t const& a0, uint32_t const& a1,
                  uint32_t const& a2, uint32_t const& a3, uint32_t const& b0, uint32_t const& b1,
                  uint32_t const& c0, uint32_t const& c1) {
    auto const half = [](uint32_t bits) { return float(cutlass::half_t::bitcast(uint16_t(bits))); };
    auto const pack = [](float low, float high) {
      return uint32_t(cutlass::half_t(low).raw()) | uint32_t(cutlass::half_t(high).raw()) << 16;
    };
    float c[4] = {half(c0), half(c0 >> 16), half(c1), half(c1 >> 16)};
    simt::engine::mma_m16n8k16(simt::engine::MmaInput::kFloat16, c, {a0, a1, a2, a3}, {b0, b1});
    d0 = pack(c[0], c[1]);
    d1 = pack(c[2], c[3]);
  }
};

struct Mma {
  template <class Element, class Accumulator = float>
  using Mma16816 = HostMma<Element, Accumulator>;

  template <class A>
  static void mma_int8(int32_t (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2],
                       int32_t const (&c)[4]) {
    simt::engine::mma_m16n8k32_int8(std::is_signed_v<A>, d, a, b, c);
  }

  static void mma_e4m3(uint32_t (&d)[2], uint32_t const (&a)[4], uint32_t const (&b)[2],
                       uint32_t const (&c)[2]) {
    simt::engine::mma_m16n8k32_e4m3(d, a, b, c);
  }
};

#endif

}  // namespace cutlass_attn::arch

#if !defined(CA_DEVICE_TWIN)
namespace cute {
template <class Element, class Accumulator>
struct MMA_Traits<cutlass_attn::arch::HostMma<Element, Accumulator>>
    : MMA_Traits<typename cutlass_attn::arch::detail::MmaAtom<Element, Accumulator>::type> {};
}  // namespace cute
#endif
