// Arithmetic and data movement of warp collectives, on the operands of all 32 lanes at once.
// Fragment positions come from the PTX ISA ("Matrix Fragments for mma.m16n8k16", "ldmatrix"), not
// from CuTe's traits, so the two check each other.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/e4m3.hpp"
#include "simt/engine.hpp"

namespace cutlass_attn::simt {

// SIMD width of every 64-bit machine.
using Floats = float __attribute__((vector_size(16)));
using Words = uint32_t __attribute__((vector_size(16)));
inline constexpr int kVectorLanes = 4;

inline Floats bits_to_floats(Words x) {
  Floats y;
  static_assert(sizeof(y) == sizeof(x));
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

inline Words floats_to_bits(Floats x) {
  Words y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

// Low 16 bits of each word as fp16, exact for subnormals, infinities and NaN.
inline Floats half_to_float(Words x) {
  Words const magnitude = (x & 0x7fffu) << 13;
  // Moves the exponent's bias from 15 to 127, which also makes subnormal halves normal floats.
  Words const scaled = floats_to_bits(bits_to_floats(magnitude) * 0x1p112f);
  Words const special = Words(magnitude >= 0x7c00u << 13) & 0x7f800000u;
  return bits_to_floats(scaled | special | (x & 0x8000u) << 16);
}

inline Floats bfloat_to_float(Words x) { return bits_to_floats(x << 16); }

// `count` packed 16-bit values to floats.
inline void widen(engine::MmaInput input, uint16_t const* from, float* to, int count) {
  for (int i = 0; i < count; i += kVectorLanes) {
    Words x;
    for (int j = 0; j < kVectorLanes; ++j) x[j] = from[i + j];
    Floats const y = input == engine::MmaInput::kFloat16 ? half_to_float(x) : bfloat_to_float(x);
    std::memcpy(to + i, &y, sizeof(y));
  }
}

using Floats8 = float __attribute__((vector_size(32)));
using Doubles4 = double __attribute__((vector_size(32)));

// C += A B with n columns, a multiple of 8. Each sum begins with C and takes k in order. `Vector`
// is of T.
template <class Vector, class T, int kM, int kK, int kMaxN>
void add_product(T const (&a)[kM][kK], T const (&b)[kK][kMaxN], int n, T (&c)[kM][kMaxN]) {
  constexpr int kRows = 4, kColumns = int(sizeof(Vector) / sizeof(T));
  for (int m = 0; m < kM; m += kRows) {
    for (int j = 0; j < n; j += kColumns) {
      Vector sums[kRows];
      for (int i = 0; i < kRows; ++i) std::memcpy(&sums[i], &c[m + i][j], sizeof(Vector));
      for (int k = 0; k < kK; ++k) {
        Vector columns;
        std::memcpy(&columns, &b[k][j], sizeof(Vector));
        for (int i = 0; i < kRows; ++i) sums[i] += a[m + i][k] * columns;
      }
      for (int i = 0; i < kRows; ++i) std::memcpy(&c[m + i][j], &sums[i], sizeof(Vector));
    }
  }
}

struct MmaOperands {
  uint32_t const* a;  // (4) pairs of elements of the row-major 16 x 16 matrix A
  uint32_t const* b;  // (2) pairs of elements of the column-major 16 x 8 matrix B
  float* c;           // (4) elements of the 16 x 8 matrix C
};

inline void warp_mma(engine::MmaInput input, MmaOperands* const (&lanes)[kWarpSize]) {
  uint16_t a16[16][16], b16[16][8];  // (m, k), (k, n)
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    MmaOperands const& x = *lanes[lane];
    int const group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&a16[group + i % 2 * 8][pair + i / 2 * 8], &x.a[i], 4);
    }
    for (int i = 0; i < 2; ++i) {
      b16[pair + i * 8][group] = uint16_t(x.b[i]);
      b16[pair + i * 8 + 1][group] = uint16_t(x.b[i] >> 16);
    }
    for (int i = 0; i < 4; ++i) c[group + i / 2 * 8][pair + i % 2] = x.c[i];
  }
  widen(input, &a16[0][0], &a[0][0], 16 * 16);
  widen(input, &b16[0][0], &b[0][0], 16 * 8);

  // A product of two 11-bit or 8-bit significands is exact in fp32. The sum is rounded step by
  // step; hardware aligns all 16 products and truncates once. Both are within fp32 error.
  add_product<Floats8>(a, b, 8, c);

  for (int lane = 0; lane < kWarpSize; ++lane) {
    int const group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) lanes[lane]->c[i] = c[group + i / 2 * 8][pair + i % 2];
  }
}

struct Mma8Operands {
  uint32_t const* a;  // (4) of the row-major 16 x 32 matrix A, each four int8 or uint8
  uint32_t const* b;  // (2) of the column-major 32 x 8 matrix B
  int32_t const* c;   // (4) elements of the 16 x 8 matrix C
  int32_t* d;         // (4)
};

// "Matrix Fragments for mma.m16n8k32" of the PTX ISA. Returns false if a sum overflows int32.
inline bool warp_mma_int8(bool is_signed, Mma8Operands* const (&lanes)[kWarpSize]) {
  uint8_t a[16][32];  // (m, k)
  int8_t b[8][32];    // (n, k)
  for (int lane = 0; lane < kWarpSize; ++lane) {
    int const group = lane / 4, four = lane % 4 * 4;
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&a[group + i % 2 * 8][four + i / 2 * 16], &lanes[lane]->a[i], 4);
    }
    for (int i = 0; i < 2; ++i) std::memcpy(&b[group][four + i * 16], &lanes[lane]->b[i], 4);
  }
  bool fits = true;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < 4; ++i) {
      int const m = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
      int32_t sum = 0;
      for (int k = 0; k < 32; ++k) {
        sum += (is_signed ? int32_t(int8_t(a[m][k])) : int32_t(a[m][k])) * b[n][k];
      }
      fits &= !__builtin_add_overflow(lanes[lane]->c[i], sum, &lanes[lane]->d[i]);
    }
  }
  return fits;
}

// The nearest fp16, ties to even.
inline uint16_t half_of(double x) {
  uint16_t const sign = std::signbit(x) ? 0x8000 : 0;
  double const size = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  uint64_t bits;
  std::memcpy(&bits, &size, sizeof(bits));
  int const exponent = size < 0x1p-14 ? -14 : int(bits >> 52) - 1023;
  bits = uint64_t(10 - exponent + 1023) << 52;
  double scale;  // 2^(10 - exponent); std::ldexp takes longer than all the rest
  std::memcpy(&scale, &bits, sizeof(scale));
  // The carry of an 11-bit significand increments the exponent.
  int const significand = int(std::nearbyint(size * scale));
  return uint16_t(sign | (((exponent + 14) << 10) + significand));
}

struct MmaE4m3Operands {
  uint32_t const* a;  // (4) of the row-major 16 x 32 matrix A, each four e4m3
  uint32_t const* b;  // (2) of the column-major 32 x 8 matrix B
  uint32_t const* c;  // (2) pairs of fp16 of the 16 x 8 matrix C
  uint32_t* d;        // (2)
};

// A and B have the fragments of int8 m16n8k32, pairs of C those of m16n8k16. Products of two 4-bit
// significands, and sums of 32 products and an fp16, are exact in fp64.
inline void warp_mma_e4m3(bool halves, MmaE4m3Operands* const (&lanes)[kWarpSize]) {
  float numbers[256];
  for (int bits = 0; bits < 256; ++bits) numbers[bits] = float(E4M3{uint8_t(bits)});
  double a[16][32], b[8][32];  // (m, k), (n, k)
  for (int lane = 0; lane < kWarpSize; ++lane) {
    int const group = lane / 4, four = lane % 4 * 4;
    for (int i = 0; i < 16; ++i) {
      uint8_t const bits = uint8_t(lanes[lane]->a[i / 4] >> i % 4 * 8);
      a[group + i / 4 % 2 * 8][four + i % 4 + i / 8 * 16] = numbers[bits];
    }
    for (int i = 0; i < 8; ++i) {
      b[group][four + i % 4 + i / 4 * 16] = numbers[uint8_t(lanes[lane]->b[i / 4] >> i % 4 * 8)];
    }
  }
  auto const rounded = [](double x) { return double(cutlass_attn::half_to_float(half_of(x))); };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < 2; ++i) {
      uint32_t pair = 0;
      for (int j = 0; j < 2; ++j) {
        int const m = lane / 4 + i * 8, n = lane % 4 * 2 + j;
        auto const sum_of = [&](int first, int end) {
          double sum = 0;
          for (int k = first; k < end; ++k) sum += a[m][k] * b[n][k];
          return sum;
        };
        uint16_t const c_bits = uint16_t(lanes[lane]->c[i] >> 16 * j);
        double const c = double(cutlass_attn::half_to_float(c_bits));
        double const sum =
            halves ? rounded(rounded(sum_of(0, 16)) + sum_of(16, 32)) + c : sum_of(0, 32) + c;
        pair |= uint32_t(half_of(sum)) << 16 * j;
      }
      lanes[lane]->d[i] = pair;
    }
  }
}

// An index that a kernel cannot know. The odd factor makes it a permutation.
inline int wmma_element_of(int lane, int i, int size) { return (lane + i * kWarpSize) * 77 % size; }

struct WmmaOperands {
  uint16_t const* a;
  uint16_t const* b;
  float* c;
};

inline void warp_wmma(int m, int n, WmmaOperands* const (&lanes)[kWarpSize]) {
  constexpr int kK = 16, kMax = 32;
  uint16_t a16[kMax * kK], b16[kK * kMax];
  alignas(16) float a[kMax * kK], b[kK * kMax], c[kMax * kMax];
  auto const each = [&](int size, auto const& visit) {  // visit(lane, i, element)
    for (int lane = 0; lane < kWarpSize; ++lane) {
      for (int i = 0; i < size / kWarpSize; ++i) visit(lane, i, wmma_element_of(lane, i, size));
    }
  };
  each(m * kK, [&](int lane, int i, int at) { a16[at] = lanes[lane]->a[i]; });
  each(kK * n, [&](int lane, int i, int at) { b16[at] = lanes[lane]->b[i]; });
  each(m * n, [&](int lane, int i, int at) { c[at] = lanes[lane]->c[i]; });
  widen(engine::MmaInput::kFloat16, a16, a, m * kK);
  widen(engine::MmaInput::kFloat16, b16, b, kK * n);
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; column += kVectorLanes) {
      Floats sum;
      std::memcpy(&sum, &c[row * n + column], sizeof(Floats));
      for (int k = 0; k < kK; ++k) {
        Floats x;
        std::memcpy(&x, &b[k * n + column], sizeof(Floats));
        sum += a[row * kK + k] * x;
      }
      std::memcpy(&c[row * n + column], &sum, sizeof(Floats));
    }
  }
  each(m * n, [&](int lane, int i, int at) { lanes[lane]->c[i] = c[at]; });
}

struct LoadMatrixOperands {
  char const* row;  // 16 bytes in shared memory: row lane % 8 of matrix lane / 8
  uint32_t* d;      // (4), one pair of each matrix
};

inline void warp_load_matrix(bool transposed, LoadMatrixOperands* const (&lanes)[kWarpSize]) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t x[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(x[row], lanes[8 * matrix + row]->row, 16);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      int const group = lane / 4, pair = lane % 4 * 2;
      uint32_t const low = transposed ? x[pair][group] : x[group][pair];
      uint32_t const high = transposed ? x[pair + 1][group] : x[group][pair + 1];
      lanes[lane]->d[matrix] = low | high << 16;
    }
  }
}

inline void warp_transpose_matrix(uint32_t* const (&lanes)[kWarpSize]) {
  uint16_t x[8][8];
  for (int lane = 0; lane < kWarpSize; ++lane)
    std::memcpy(&x[lane / 4][lane % 4 * 2], lanes[lane], 4);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    int const group = lane / 4, pair = lane % 4 * 2;
    *lanes[lane] = uint32_t(x[pair][group]) | uint32_t(x[pair + 1][group]) << 16;
  }
}

inline void warp_shuffle_xor(int lane_mask, uint64_t* const (&lanes)[kWarpSize]) {
  uint64_t before[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) before[lane] = *lanes[lane];
  for (int lane = 0; lane < kWarpSize; ++lane) *lanes[lane] = before[lane ^ lane_mask];
}

struct ShuffleOperands {
  uint64_t value;
  int source;
};
inline void warp_shuffle(ShuffleOperands* const (&lanes)[kWarpSize]) {
  uint64_t before[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) before[lane] = lanes[lane]->value;
  for (ShuffleOperands* const lane : lanes) lane->value = before[lane->source];
}

inline void warp_any(bool* const (&lanes)[kWarpSize]) {
  bool any = false;
  for (bool* const lane : lanes) any |= *lane;
  for (bool* const lane : lanes) *lane = any;
}

}  // namespace cutlass_attn::simt
