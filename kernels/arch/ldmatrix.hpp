// ldmatrix and stmatrix: load and store four 8 x 8 matrices of 16-bit elements in shared memory, in
// the layout of mma. movmatrix: transposes one such matrix.
#pragma once

#include "arch/shared.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct LdMatrix {
  // ldmatrix.x4: lane l supplies the address of row l % 8 (16 bytes) of matrix l / 8; d[i] is
  // matrix i.
  CUTE_DEVICE static void ldmatrix_x4(SharedMemory::SmemAddress row, uint32_t (&d)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row));
  }
  CUTE_DEVICE static void ldmatrix_x4_trans(SharedMemory::SmemAddress row, uint32_t (&d)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row));
  }
  // movmatrix.trans: lane l passes columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, and receives
  // those rows of column l / 4.
  CUTE_DEVICE static uint32_t movmatrix_trans(uint32_t x) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    return x;
  }
};

struct StMatrix {  // compute capability 9.0 and later
  // stmatrix.x4: lane l supplies the address of row l % 8 (16 bytes) of matrix l / 8; d[i] is the
  // lane's part of matrix i.
  CUTE_DEVICE static void stmatrix_x4(SharedMemory::SmemAddress row, uint32_t const (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
                 : "memory");
  }
};

#else

struct LdMatrix {
  static void ldmatrix_x4(SharedMemory::SmemAddress row, uint32_t (&d)[4]) {
    simt::engine::ldmatrix_x4(false, reinterpret_cast<void const*>(row), d);
  }
  static void ldmatrix_x4_trans(SharedMemory::SmemAddress row, uint32_t (&d)[4]) {
    simt::engine::ldmatrix_x4(true, reinterpret_cast<void const*>(row), d);
  }
  static uint32_t movmatrix_trans(uint32_t x) { return simt::engine::movmatrix_trans(x); }
};

struct StMatrix {
  static void stmatrix_x4(SharedMemory::SmemAddress row, uint32_t const (&d)[4]) {
    simt::engine::stmatrix_x4(reinterpret_cast<void*>(row), d);
  }
};

#endif

}  // namespace cutlass_attn::arch
