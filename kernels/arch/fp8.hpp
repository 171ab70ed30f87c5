// Conversions from and to 8-bit floating point.
#pragma once

#include "arch/twins.hpp"
#include "core/e4m3.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Fp8 {
  // cvt.rn.satfinite.e4m3x2: four floats, rounded to nearest even and saturated at 448, `x0` in the
  // lowest byte. Compute capability 8.9 and later.
  CUTE_DEVICE static uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    uint32_t packed;
    // PTX names the high byte first.
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}\n"
        : "=r"(packed)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return packed;
  }

  // pack_e4m3() for two pairs of fp16.
  CUTE_DEVICE static uint32_t pack_halves_e4m3(uint32_t pair0, uint32_t pair1) {
    uint32_t packed;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
        "mov.b32 %0, {low, high};\n"
        "}\n"
        : "=r"(packed)
        : "r"(pair0), "r"(pair1));
    return packed;
  }

  // Converts the four e4m3 numbers of a word to two pairs of Element, exactly.
  template <class Element>
  CUTE_DEVICE static void unpack_e4m3(uint32_t four, uint32_t (&pairs)[2]) {
    static_assert(is_16_bit<Element>);
    to_halves(four, pairs);
    if constexpr (!std::is_same_v<Element, cutlass::half_t>) {
      pairs[0] = halves_to_bfloats(pairs[0]);
      pairs[1] = halves_to_bfloats(pairs[1]);
    }
  }

 private:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  CUTE_DEVICE static void to_halves(uint32_t four, uint32_t (&pairs)[2]) {
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(four));
  }
#else
  CUTE_DEVICE static void to_halves(uint32_t four, uint32_t (&pairs)[2]) {
    pairs[0] = to_halves_of(__byte_perm(four, 0, 0x1404));
    pairs[1] = to_halves_of(__byte_perm(four, 0, 0x3424));
  }
  CUTE_DEVICE static uint32_t to_halves_of(uint32_t two_e4m3) {
    uint32_t halves;
    asm("mul.rn.f16x2 %0, %1, %2;"
        : "=r"(halves)
        : "r"(small_halves_of(two_e4m3)), "r"(0x5c005c00u));  // 256
    return halves;
  }
#endif

  CUTE_DEVICE static uint32_t halves_to_bfloats(uint32_t pair) {
    float const low = half_to_float(uint16_t(pair)), high = half_to_float(uint16_t(pair >> 16));
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }
};

#else

struct Fp8 {
  static uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    return uint32_t(to_e4m3(x0).raw()) | uint32_t(to_e4m3(x1).raw()) << 8 |
           uint32_t(to_e4m3(x2).raw()) << 16 | uint32_t(to_e4m3(x3).raw()) << 24;
  }
  static uint32_t pack_halves_e4m3(uint32_t pair0, uint32_t pair1) {
    auto const half = [](uint32_t bits) { return half_to_float(uint16_t(bits)); };
    return pack_e4m3(half(pair0), half(pair0 >> 16), half(pair1), half(pair1 >> 16));
  }

  template <class Element>
  static void unpack_e4m3(uint32_t four, uint32_t (&pairs)[2]) {
    static_assert(is_16_bit<Element>);
    auto const element = [&](int i) {
      return uint32_t(Element(float(E4M3{uint8_t(four >> 8 * i)})).raw());
    };
    pairs[0] = element(0) | element(1) << 16;
    pairs[1] = element(2) | element(3) << 16;
  }
};

#endif

}  // namespace cutlass_attn::arch
