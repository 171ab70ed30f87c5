// wmma, kM x kN x 16, fp16 with fp32 accumulators. A warp holds matrices as fragments; the mapping
// of elements to lanes is unspecified, but equal for fragments of one type.
//
// The mapping is undocumented and differs between GPUs. The host twin uses a mapping that no GPU
// has, so that a kernel that relies on the position of an element gets wrong numbers. In a load or
// store, each lane accesses shared memory at its own time: a barrier has to order them after writes
// of other lanes.
//
// The device twin is PTX instead of <mma.h>, because <mma.h> includes crt/mma.h, and CUDA's wheels
// for NVRTC and the runtime have no crt folder.
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

template <int kM, int kN>
struct WmmaShape;
template <>
struct WmmaShape<16, 16> {
  static constexpr char kName[] = "m16n16k16";
};
template <>
struct WmmaShape<8, 32> {
  static constexpr char kName[] = "m8n32k16";
};

// The constraint "C" inserts a string into the instruction. The "memory" clobber is there because
// kernels also access the matrices in shared memory by C++.
template <int kM, int kN>
struct Wmma {
  using Shape = WmmaShape<kM, kN>;
  struct RowMajor {
    static constexpr char kName[] = "row";
  };
  struct ColMajor {
    static constexpr char kName[] = "col";
  };
  // Pairs of fp16. In m8n32k16, A has half as many elements and holds each twice.
  struct A {
    uint32_t x[8];
  };
  template <class Order>
  struct B {
    uint32_t x[8];
  };
  struct Accumulator {
    static constexpr int num_elements = 8;
    float x[num_elements];
  };

  CUTE_DEVICE static void fill(Accumulator& c, float value) {
    CUTE_UNROLL
    for (float& x : c.x) x = value;
  }

  // wmma.load.a, .b and .c, and wmma.store.d. `ld`: leading dimension in elements.
  CUTE_DEVICE static void load(A& a, cutlass::half_t const* from, int ld) {
    asm volatile(
        "wmma.load.a.sync.aligned.row.%10.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
        : "=r"(a.x[0]), "=r"(a.x[1]), "=r"(a.x[2]), "=r"(a.x[3]), "=r"(a.x[4]), "=r"(a.x[5]),
          "=r"(a.x[6]), "=r"(a.x[7])
        : "r"(shared_address(from)), "r"(ld), "C"(Shape::kName)
        : "memory");
  }
  template <class Order>
  CUTE_DEVICE static void load(B<Order>& b, cutlass::half_t const* from, int ld) {
    asm volatile(
        "wmma.load.b.sync.aligned.%11.%10.shared.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
        : "=r"(b.x[0]), "=r"(b.x[1]), "=r"(b.x[2]), "=r"(b.x[3]), "=r"(b.x[4]), "=r"(b.x[5]),
          "=r"(b.x[6]), "=r"(b.x[7])
        : "r"(shared_address(from)), "r"(ld), "C"(Shape::kName), "C"(Order::kName)
        : "memory");
  }
  CUTE_DEVICE static void load(Accumulator& c, float const* from, int ld) {
    asm volatile(
        "wmma.load.c.sync.aligned.row.%10.shared.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
        : "=f"(c.x[0]), "=f"(c.x[1]), "=f"(c.x[2]), "=f"(c.x[3]), "=f"(c.x[4]), "=f"(c.x[5]),
          "=f"(c.x[6]), "=f"(c.x[7])
        : "r"(shared_address(from)), "r"(ld), "C"(Shape::kName)
        : "memory");
  }
  CUTE_DEVICE static void store(float* to, Accumulator const& c, int ld) {
    asm volatile(
        "wmma.store.d.sync.aligned.row.%10.shared.f32 [%8], {%0, %1, %2, %3, %4, %5, %6, %7}, %9;"
        :
        : "f"(c.x[0]), "f"(c.x[1]), "f"(c.x[2]), "f"(c.x[3]), "f"(c.x[4]), "f"(c.x[5]), "f"(c.x[6]),
          "f"(c.x[7]), "r"(shared_address(to)), "r"(ld), "C"(Shape::kName)
        : "memory");
  }

  // wmma.mma: c += a b
  template <class Order>
  CUTE_DEVICE static void mma(Accumulator& c, A const& a, B<Order> const& b) {
    asm volatile(
        "wmma.mma.sync.aligned.row.%25.%24.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]),
          "+f"(c.x[6]), "+f"(c.x[7])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), "r"(a.x[6]),
          "r"(a.x[7]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(b.x[4]), "r"(b.x[5]),
          "r"(b.x[6]), "r"(b.x[7]), "C"(Shape::kName), "C"(Order::kName));
  }
};

#else

template <int kM, int kN>
struct Wmma {
  static constexpr int kK = 16;
  struct RowMajor {};
  struct ColMajor {};

  // Element i of a lane is element simt::engine::wmma_element() of the matrix in row-major order.
  template <class T, int kRows, int kColumns, class Order>
  struct Fragment {
    static constexpr int num_elements = kRows * kColumns / simt::kWarpSize;
    T x[num_elements];

    // Offset of element i of this lane in a matrix with leading dimension `ld`.
    static int offset(int i, int ld) {
      int const at = simt::engine::wmma_element(i, kRows * kColumns);
      int const row = at / kColumns, column = at % kColumns;
      return std::is_same_v<Order, RowMajor> ? row * ld + column : column * ld + row;
    }
    // Reports addresses and leading dimensions that the instruction does not allow.
    static void check(char const* what, T const* matrix, int ld) {
      constexpr bool kByRows = std::is_same_v<Order, RowMajor>;
      simt::engine::check_matrix(what, matrix, ld, kByRows ? kRows : kColumns,
                                 kByRows ? kColumns : kRows, sizeof(T));
    }
  };
  using A = Fragment<cutlass::half_t, kM, kK, RowMajor>;
  template <class Order>
  using B = Fragment<cutlass::half_t, kK, kN, Order>;
  using Accumulator = Fragment<float, kM, kN, RowMajor>;

  static void fill(Accumulator& c, float value) {
    for (float& x : c.x) x = value;
  }

  template <class T, int kRows, int kColumns, class Order>
  static void load(Fragment<T, kRows, kColumns, Order>& x, T const* from, int ld) {
    x.check("load_matrix_sync", from, ld);
    for (int i = 0; i < x.num_elements; ++i) x.x[i] = from[x.offset(i, ld)];
  }
  static void store(float* to, Accumulator const& c, int ld) {
    c.check("store_matrix_sync", to, ld);
    for (int i = 0; i < c.num_elements; ++i) to[c.offset(i, ld)] = c.x[i];
  }

  template <class Order>
  static void mma(Accumulator& c, A const& a, B<Order> const& b) {
    uint16_t a_bits[A::num_elements], b_bits[B<Order>::num_elements];
    std::memcpy(a_bits, a.x, sizeof(a_bits));
    std::memcpy(b_bits, b.x, sizeof(b_bits));
    simt::engine::wmma(kM, kN, c.x, a_bits, b_bits);
  }
};

#endif

}  // namespace cutlass_attn::arch
