// Words of two numbers of 16 bits, or of four bytes.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Packed {
  // prmt: byte i of the result is the byte of x (0 to 3) or y (4 to 7) whose number is digit i of
  // `order`, from the right.
  CUTE_DEVICE static uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t order) {
    return __byte_perm(x, y, order);
  }

  // 0xffff in each half whose 15 lower bits are below those of `end`, which are at most 0x7c00: so
  // far fp16 has the order of its bits, and beyond are infinity and NaN.
  CUTE_DEVICE static uint32_t below_15bit(uint32_t x, uint32_t end) {
    uint32_t mask;
    asm("{\n.reg .b32 t;\nabs.f16x2 t, %1;\nset.lt.u32.f16x2 %0, t, %2;\n}"
        : "=r"(mask)
        : "r"(x), "r"(end));
    return mask;
  }
};

#else

struct Packed {
  static uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t order) {
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
};

#endif

}  // namespace cutlass_attn::arch
