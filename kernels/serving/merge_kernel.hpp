// Merges results over two sets of keys, in one launch.
//
// Grid: blocks of 128 threads with 8 rows each. A row is one head of one query, and is shared by 16
// threads. A thread takes 16 bytes at a time if all rows are aligned to 16 bytes, otherwise one
// element. No shared memory. Every operation is commutative in the two inputs and rounded once, so
// swapping the inputs gives bitwise equal results.
#pragma once

#include "core/launch.hpp"
#include "core/macros.hpp"
#include "core/math.hpp"
#include "core/merge.hpp"
#include "serving/convert.hpp"

namespace cutlass_attn::serving {

struct MergeParams {
  MergeProblem problem;
  bool is_aligned;  // addresses and lengths of rows are multiples of 16 bytes
};

// a * b, rounded, never contracted into a fused multiply-add.
CA_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

template <class Element, class Convert = ByConstructor>
struct MergeKernel {
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocksPerSm = 4;
  static constexpr int kLanes = 16;
  static constexpr int kRows = kThreads / kLanes;  // per block

  static int64_t rows(MergeProblem const& p) { return int64_t(p.batch) * p.seqlen * p.num_heads; }
  static Launch launch(MergeParams const& params) {
    return {(rows(params.problem) + kRows - 1) / kRows, 1, kThreads, 0};
  }

  CA_HOST_DEVICE static void run(MergeParams const& params, int block, int thread) {
    MergeProblem const& p = params.problem;
    int64_t const row = int64_t(block) * kRows + thread / kLanes;
    if (row < int64_t(p.batch) * p.seqlen * p.num_heads) {
      merge_row(p, int(row / p.num_heads), int(row % p.num_heads), params.is_aligned,
                thread % kLanes, kLanes);
    }
  }

  // `lanes` threads share the row.
  CA_HOST_DEVICE static void merge_row(MergeProblem const& p, int query, int head, bool is_aligned,
                                       int lane, int lanes) {
    int const batch = query / p.seqlen, i = query % p.seqlen;
    float const a = seen(at(p.lse_a, batch, head, i)), b = seen(at(p.lse_b, batch, head, i));
    float const top = a > b ? a : b, finite = top == -kInf ? 0.0f : top;
    float const exp_a = expf(a - finite), exp_b = expf(b - finite), total = exp_a + exp_b;
    float const divisor = total == 0.0f ? 1.0f : total;
    float const of_a = exp_a / divisor, of_b = exp_b / divisor;
    if (lane == 0) at(p.lse, batch, head, i) = total == 0.0f ? -kInf : finite + logf(divisor);

    Element const* const from_a = row_of(p.a, batch, head, i);
    Element const* const from_b = row_of(p.b, batch, head, i);
    Element* const to = row_of(p.o, batch, head, i);
    // Values of a side without visible keys are ignored.
    auto const merged = [&](Element x, Element y) {
      float const part_a = of_a == 0.0f ? 0.0f : rounded_product(Convert::load(x), of_a);
      float const part_b = of_b == 0.0f ? 0.0f : rounded_product(Convert::load(y), of_b);
      Element result;
      Convert::store(part_a + part_b, result);
      return result;
    };
    if (!is_aligned) {
      for (int d = lane; d < p.head_dim; d += lanes) to[d] = merged(from_a[d], from_b[d]);
      return;
    }
    struct alignas(16) Vector {
      Element x[16 / sizeof(Element)];
    };
    int const count = p.head_dim * int(sizeof(Element)) / 16;
    for (int v = lane; v < count; v += lanes) {
      Vector const x = reinterpret_cast<Vector const*>(from_a)[v];
      Vector const y = reinterpret_cast<Vector const*>(from_b)[v];
      Vector z;
      CA_UNROLL
      for (int j = 0; j < int(16 / sizeof(Element)); ++j) z.x[j] = merged(x.x[j], y.x[j]);
      reinterpret_cast<Vector*>(to)[v] = z;
    }
  }

 private:
  // -inf for a row that saw no key.
  CA_HOST_DEVICE static float seen(float lse) { return lse == kInf ? -kInf : lse; }

  CA_HOST_DEVICE static float& at(PerRow const& x, int64_t batch, int64_t head, int64_t row) {
    return x.data[batch * x.batch_stride + head * x.head_stride + row * x.row_stride];
  }
  CA_HOST_DEVICE static Element* row_of(Operand const& t, int64_t batch, int64_t head,
                                        int64_t row) {
    return static_cast<Element*>(t.data) + batch * t.batch_stride + head * t.head_stride +
           row * t.row_stride;
  }
};

}  // namespace cutlass_attn::serving
