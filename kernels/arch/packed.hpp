// Operations on words of two 16-bit numbers or of four bytes.
#pragma once

#include "arch/twins.hpp"
#include "core/math.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Packed {
  // prmt: byte i of the result is byte n of x (n = 0 to 3) or of y (n = 4 to 7), where n is hex
  // digit i of `order`, from the right.
  CUTE_DEVICE static uint32_t prmt(uint32_t x, uint32_t y, uint32_t order) {
    return __byte_perm(x, y, order);
  }

  // 0xffff in each half of x whose lower 15 bits are less than those of `end`, which is at most
  // 0x7c00: up to that value fp16 is ordered like its bits; beyond it are infinity and NaN.
  CUTE_DEVICE static uint32_t below_15bit(uint32_t x, uint32_t end) {
    uint32_t mask;
    asm("{\n.reg .b32 t;\nabs.f16x2 t, %1;\nset.lt.u32.f16x2 %0, t, %2;\n}"
        : "=r"(mask)
        : "r"(x), "r"(end));
    return mask;
  }

  // On pairs of fp16: add, mul, fma (rounded once), and max that propagates NaN.
  CUTE_DEVICE static uint32_t add_halves(uint32_t x, uint32_t y) {
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
    return sum;
  }
  CUTE_DEVICE static uint32_t multiply_halves(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
  }
  CUTE_DEVICE static uint32_t multiply_add_halves(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
  }
  CUTE_DEVICE static uint32_t max_halves(uint32_t x, uint32_t y) {
    uint32_t larger;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
    return larger;
  }
};

#else

struct Packed {
  static uint32_t prmt(uint32_t x, uint32_t y, uint32_t order) {
    uint64_t const bytes = uint64_t(y) << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      result |= uint32_t(bytes >> (order >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
    }
    return result;
  }

  static uint32_t below_15bit(uint32_t x, uint32_t end) {
    uint32_t const low = (x & 0x7fffu) < (end & 0xffffu) ? 0xffffu : 0;
    return low | ((x >> 16 & 0x7fffu) < end >> 16 ? 0xffff0000u : 0);
  }

  static uint32_t add_halves(uint32_t x, uint32_t y) {
    return of_halves([](float x, float y, float) { return x + y; }, x, y, 0);
  }
  static uint32_t multiply_halves(uint32_t x, uint32_t y) {
    return of_halves([](float x, float y, float) { return x * y; }, x, y, 0);
  }
  static uint32_t multiply_add_halves(uint32_t x, uint32_t y, uint32_t z) {
    return of_halves([](float x, float y, float z) { return std::fma(x, y, z); }, x, y, z);
  }
  static uint32_t max_halves(uint32_t x, uint32_t y) {
    return of_halves([](float x, float y, float) { return x > y || x != x ? x : y; }, x, y, 0);
  }

 private:
  template <class Function>
  static uint32_t of_halves(Function const& function, uint32_t x, uint32_t y, uint32_t z) {
    uint32_t result = 0;
    for (int shift = 0; shift < 32; shift += 16) {
      auto const half = [&](uint32_t bits) { return half_to_float(uint16_t(bits >> shift)); };
      result |= uint32_t(cutlass::half_t(function(half(x), half(y), half(z))).raw()) << shift;
    }
    return result;
  }
};

#endif

}  // namespace cutlass_attn::arch
