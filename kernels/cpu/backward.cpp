// Vectorised loops, see tile.cpp. Neither option changes a result.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3,no-trapping-math,no-math-errno")
#endif

#include "cpu/backward.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/mask.hpp"
#include "cpu/block.hpp"
#include "cpu/threads.hpp"
#include "runtime/options.hpp"

namespace cutlass_attn::cpu {
namespace {

// The type in which operands of a dtype are computed. The LSE, sinks, and the gradients of sinks
// and bias have this type as well.
template <class Element>
using RealOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// The rows of a block: neighbouring queries of one head.
template <class Real>
struct Rows {
  VarlenSeqInfo seq;  // of the batch entry
  int count = 0;      // rows from here on are padding, with all keys masked
  int32_t head[kMaxBlock], query[kMaxBlock], lo[kMaxBlock], hi[kMaxBlock];
  Real lse[kMaxBlock];
  Real delta[kMaxBlock];  // subtracted from dP: dO.O minus the gradient of the LSE

  explicit Rows(VarlenSeqInfo const& seq) : seq(seq) {}

  void set(IntervalMask const& mask, int of_head, int q_begin, int width) {
    count = std::min(width, mask.seqlen_q - q_begin);
    for (int r = 0; r < width; ++r) {
      head[r] = of_head;
      query[r] = q_begin + std::min(r, count - 1);
      lo[r] = r < count ? mask.lo(query[r]) : 0;
      hi[r] = r < count ? mask.hi(query[r]) : 0;
    }
  }

  template <class Element>
  Element* row_of(Operand const& t, int r) const {
    return seq.template queries<Element>(t, head[r]) + query[r] * t.row_stride;
  }
};

int64_t padded(int64_t count) { return (count + kMaxLanes - 1) / kMaxLanes * kMaxLanes; }

// A thread's memory, large enough for the widest block of any instruction set.
template <class Real>
struct Buffers {
  Real *q, *grad_o, *grad_q;         // [column][row]
  Real *q_columns, *grad_o_columns;  // in blocks of columns
  Real *p, *ds, *slope, *factor;     // [key][row] of a tile; slope is null without a softcap
  Real *k_panel, *v_panel;           // [key][column] of a tile
  Real *grad_k = nullptr, *grad_v = nullptr;  // [tile of keys], each tile in blocks of columns
  double* grad_bias = nullptr;                // [key][row]

  Buffers(Problem const& p, char* scratch) { place(p, scratch); }

  static size_t bytes(Problem const& p) { return size_t(Buffers(p, nullptr).place(p, nullptr)); }

 private:
  // Returns the number of bytes used.
  int64_t place(Problem const& problem, char* scratch) {
    int64_t used = 0;
    auto const take = [&](auto*& array, int64_t count) {
      using T = std::remove_reference_t<decltype(*array)>;
      array = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(scratch) + uintptr_t(used));
      used += padded(count) * int64_t(sizeof(T));
    };
    int64_t const d = padded(problem.head_dim), dv = padded(problem.head_dim_v);
    take(q, d * kMaxBlock);
    take(grad_o, dv * kMaxBlock);
    take(grad_q, d * kMaxBlock);
    take(q_columns, d * kMaxBlock);
    take(grad_o_columns, dv * kMaxBlock);
    for (Real** tile : {&p, &ds, &slope, &factor}) take(*tile, kTileKeys * kMaxBlock);
    if (!(Scalars<Real>(problem).softcap > 0)) slope = nullptr;
    take(k_panel, kTileKeys * d);
    take(v_panel, kTileKeys * dv);
    if (problem.grad == nullptr) return used;
    // The gradient of a bias is computed in a separate pass, in the memory of dK and dV.
    int64_t const tiles = (int64_t(problem.seq_k.seqlen) + kTileKeys - 1) / kTileKeys;
    int64_t const before = used;
    take(grad_k, tiles * kTileKeys * d);
    take(grad_v, tiles * kTileKeys * dv);
    int64_t const of_heads = used;
    used = before;
    if (problem.grad->bias) take(grad_bias, int64_t(problem.seq_k.seqlen) * kMaxBlock);
    return std::max(used, of_heads);
  }
};

struct Interval {
  int begin, end;
};

// Entries of a bias gradient that one thread sums: ranges of batch entries, heads and queries.
struct BiasItem {
  Interval batch, head, query;
};

#define CA_CPU_BODY "cpu/backward_body.hpp"
#include "cpu/each_isa.hpp"

// Multiply-adds, without a mask.
double work_of(Problem const& p) {
  return double(p.seq_q.seqlen) * p.seq_k.seqlen * p.batch * p.num_heads_q *
         (3.0 * p.head_dim + 2.0 * p.head_dim_v);
}

size_t scratch_bytes(Problem const& p) {
  return p.q.dtype == DType::kFloat64 ? Buffers<double>::bytes(p) : Buffers<float>::bytes(p);
}

Status run_biases(Problem const& p, RunOptions const& options, Isa isa) {
  PerLogit const& t = p.grad->bias;
  int const block = CA_CPU_CALL(isa, block_rows(p.q.dtype));
  // Number of parts of a dimension: ceil(size / step), or 1 if it is broadcast.
  auto const parts = [](int64_t stride, int size, int step) {
    return stride == 0 ? 1 : (size + step - 1) / step;
  };
  auto const part = [](int64_t stride, int size, int step, int64_t i) -> Interval {
    if (stride == 0) return {0, size};
    return {int(i) * step, std::min(size, (int(i) + 1) * step)};
  };
  int64_t const batches = parts(t.batch_stride, p.batch, 1);
  int64_t const heads = parts(t.head_stride, p.num_heads_q, 1);
  int64_t const blocks = parts(t.row_stride, p.seq_q.seqlen, block);
  auto const run = [&](int64_t i, char* scratch) {
    BiasItem const item = {part(t.batch_stride, p.batch, 1, i / (heads * blocks)),
                           part(t.head_stride, p.num_heads_q, 1, i / blocks % heads),
                           part(t.row_stride, p.seq_q.seqlen, block, i % blocks)};
    CA_CPU_CALL(isa, run_bias(p.q.dtype, p, item, scratch));
  };
  return run_items(batches * heads * blocks, work_of(p), scratch_bytes(p), options, run);
}

}  // namespace

Status attention_backward(Problem const& params, RunOptions const& options) {
  static Isa const isa = best_isa();
  return attention_backward(params, options, isa);
}

Status attention_backward(Problem const& p, RunOptions const& options, Isa isa) {
  Gradients const& grad = *p.grad;
  std::vector<double> sinks(size_t(p.batch) * size_t(p.num_heads_q));
  auto const run = [&](int64_t i, char* scratch) {
    int const batch = int(i / p.num_heads_kv), kv_head = int(i % p.num_heads_kv);
    double* const of_batch = sinks.data() + int64_t(batch) * p.num_heads_q;
    CA_CPU_CALL(isa, run_kv_head(p.q.dtype, p, batch, kv_head, scratch, of_batch));
  };
  Status status =
      run_items(int64_t(p.batch) * p.num_heads_kv, work_of(p), scratch_bytes(p), options, run);
  for (int head = 0; status.ok() && grad.sinks && head < p.num_heads_q; ++head) {
    double sum = 0;
    for (int batch = 0; batch < p.batch; ++batch) {
      sum += sinks[size_t(batch) * size_t(p.num_heads_q) + size_t(head)];
    }
    if (p.q.dtype == DType::kFloat64) {
      reinterpret_cast<double*>(grad.sinks)[head] = sum;
    } else {
      grad.sinks[head] = float(sum);
    }
  }
  if (status.ok() && grad.bias) status = run_biases(p, options, isa);
  return status;
}

Status attention_forward_float64(Problem const& p, RunOptions const& options, Isa isa) {
  int const block = CA_CPU_CALL(isa, block_rows(p.q.dtype));
  int64_t const blocks = (int64_t(p.seq_q.seqlen) + block - 1) / block;
  auto const run = [&](int64_t i, char* scratch) {
    int64_t const head = i / blocks;
    CA_CPU_CALL(isa, run_forward(p, int(head / p.num_heads_q), int(head % p.num_heads_q),
                                 int(i % blocks) * block, scratch));
  };
  return run_items(blocks * p.batch * p.num_heads_q, work_of(p), scratch_bytes(p), options, run);
}

}  // namespace cutlass_attn::cpu
