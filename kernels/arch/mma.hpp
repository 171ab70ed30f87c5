// mma.sync: m16n8k16 of fp16 and bf16, and m16n8k32 of int8 and e4m3.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Mma {
  // mma.sync m16n8k16 of Element with fp32 accumulators: d += a b.
  template <class Element>
  CUTE_DEVICE static void mma_m16n8k16(float (&d)[4], uint32_t const (&a)[4],
                                       uint32_t const (&b)[2]) {
    static_assert(is_16_bit<Element>);
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  // mma.sync m16n8k16 of fp16 with fp16 accumulators: d += a b.
  template <class Element>
  CUTE_DEVICE static void mma_m16n8k16(cutlass::half_t (&d)[4], uint32_t const (&a)[4],
                                       uint32_t const (&b)[2]) {
    static_assert(std::is_same_v<Element, cutlass::half_t>);
    auto& words = reinterpret_cast<uint32_t (&)[2]>(d);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
        "{%0, %1};"
        : "+r"(words[0]), "+r"(words[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  // mma.sync m16n8k32 of int8 with int32 accumulators: d = a b + c. A: type of a, int8_t or
  // uint8_t.
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

  // mma.sync m16n8k32 of e4m3 with fp16 accumulators: d = a b + c. Compute capability 8.9 and
  // later; CUDA 12.8 and later.
  CUTE_DEVICE static void mma_e4m3(uint32_t (&d)[2], uint32_t const (&a)[4], uint32_t const (&b)[2],
                                   uint32_t const (&c)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
        "{%8, %9};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]));
  }
};

#else

struct Mma {
  template <class Element>
  static void mma_m16n8k16(float (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    static_assert(is_16_bit<Element>);
    using simt::engine::MmaInput;
    constexpr MmaInput kInput =
        std::is_same_v<Element, cutlass::half_t> ? MmaInput::kFloat16 : MmaInput::kBFloat16;
    simt::engine::mma_m16n8k16(kInput, d, a, b);
  }
  // With fp16 accumulators: the sum of the accumulator and 16 products is computed in fp32 and
  // rounded once to fp16, to nearest even. Hardware may also round after the first eight products,
  // so compare results by a rule that allows both (python/cutlass_attn/testing.py).
  template <class Element>
  static void mma_m16n8k16(cutlass::half_t (&d)[4], uint32_t const (&a)[4],
                           uint32_t const (&b)[2]) {
    static_assert(std::is_same_v<Element, cutlass::half_t>);
    float c[4] = {float(d[0]), float(d[1]), float(d[2]), float(d[3])};
    simt::engine::mma_m16n8k16(simt::engine::MmaInput::kFloat16, c, a, b);
    for (int i = 0; i < 4; ++i) d[i] = cutlass::half_t(c[i]);
  }

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
