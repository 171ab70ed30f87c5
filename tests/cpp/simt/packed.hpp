// Dense calls as packed sequences of one call, for kernels that take packed sequences.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/problem.hpp"

namespace packed {

using cutlass_attn::Operand;
using cutlass_attn::Problem;

// Rows of an operand, copied one by one to their positions in the new layout.
struct Rows {
  static constexpr uint16_t kNaN = 0x7fff;
  std::vector<uint16_t> memory;

  explicit Rows(int64_t elements) : memory(size_t(elements), kNaN) {}

  // copy(from, to) in either direction. at(b, h, r): position of the row in this layout.
  template <class At>
  void move(Operand const& t, int batch, int heads, int rows, int columns, bool back, At&& at) {
    for (int b = 0; b < batch; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int r = 0; r < rows; ++r) {
          uint16_t* const there = static_cast<uint16_t*>(t.data) + b * t.batch_stride +
                                  h * t.head_stride + r * t.row_stride;
          uint16_t* const here = memory.data() + at(b, h, r);
          std::memcpy(back ? there : here, back ? here : there, size_t(columns) * 2);
        }
      }
    }
  }
};

// Packs the batch entries of calls that differ only in their lengths; after the first entry comes
// one without queries and keys. After the keys of each entry are `gap` ignored rows of NaN
// (seqused), and NaN after all entries.
struct Packed {
  Problem problem;
  std::vector<int32_t> cu_q = {0}, cu_k = {0}, used_k;

  explicit Packed(std::vector<Problem> const& calls, int gap = 0)
      : problem(calls[0]), calls_(calls) {
    problem.seq_q.seqlen = problem.seq_k.seqlen = 0;
    for (Problem const& p : calls) {
      for (int b = 0; b < p.batch; ++b) {
        add(p.seq_q.seqlen, p.seq_k.seqlen, gap);
        if (cu_q.size() == 2) add(0, 0, gap);
      }
    }
    problem.batch = int(used_k.size());
    Problem const& p = calls[0];
    q_ = pack(problem.q, &Problem::q, cu_q, p.num_heads_q, p.head_dim);
    k_ = pack(problem.k, &Problem::k, cu_k, p.num_heads_kv, p.head_dim);
    v_ = pack(problem.v, &Problem::v, cu_k, p.num_heads_kv, p.head_dim_v);
    o_ = pack(problem.o, &Problem::o, cu_q, p.num_heads_q, p.head_dim_v);
    lse_.resize(size_t(p.num_heads_q) * size_t(cu_q.back()));
    // NaN where nothing is written.
    std::memset(lse_.data(), 0xff, lse_.size() * sizeof(float));
    problem.softmax_lse = lse_.data();
    problem.seq_q.cu_seqlens = cu_q.data(), problem.seq_q.total = cu_q.back();
    problem.seq_k.cu_seqlens = cu_k.data(), problem.seq_k.total = cu_k.back();
    if (gap > 0) problem.seq_k.seqused = used_k.data();
  }
  Packed(Packed const&) = delete;

  // Copies the results to their positions in the calls.
  void give_back() {
    Problem const& first = calls_[0];
    move(o_, &Problem::o, cu_q, first.num_heads_q, first.head_dim_v, true);
    each_entry([&](Problem const& p, int b, int entry) {
      for (int h = 0; h < p.num_heads_q; ++h) {
        int64_t const rows = p.seq_q.seqlen;
        std::copy_n(lse_.begin() + int64_t(h) * cu_q.back() + cu_q[size_t(entry)], rows,
                    p.softmax_lse + (int64_t(b) * p.num_heads_q + h) * rows);
      }
    });
  }

 private:
  std::vector<Problem> calls_;
  Rows q_{0}, k_{0}, v_{0}, o_{0};
  std::vector<float> lse_;

  void add(int queries, int keys, int gap) {
    problem.seq_q.seqlen = std::max(problem.seq_q.seqlen, queries);
    problem.seq_k.seqlen = std::max(problem.seq_k.seqlen, keys + gap);
    cu_q.push_back(cu_q.back() + queries);
    cu_k.push_back(cu_k.back() + keys + gap);
    used_k.push_back(keys);
  }
  // visit(call, its batch entry, entry of the packed call)
  template <class Visit>
  void each_entry(Visit&& visit) const {
    int entry = 0;
    for (Problem const& p : calls_) {
      for (int b = 0; b < p.batch; ++b, ++entry) {
        if (entry == 1) ++entry;
        visit(p, b, entry);
      }
    }
  }
  Rows pack(Operand& here, Operand Problem::* operand, std::vector<int32_t> const& first, int heads,
            int columns) {
    Rows rows(int64_t(first.back()) * heads * columns + 1);
    move(rows, operand, first, heads, columns, false);
    here = {rows.memory.data(), 0, columns, int64_t(heads) * columns, here.dtype};
    return rows;
  }
  void move(Rows& rows, Operand Problem::* operand, std::vector<int32_t> const& first, int heads,
            int columns, bool back) const {
    each_entry([&](Problem const& p, int b, int entry) {
      Operand t = p.*operand;
      t.data = static_cast<uint16_t*>(t.data) + b * t.batch_stride;
      bool const is_of_keys = operand == &Problem::k || operand == &Problem::v;
      rows.move(t, 1, heads, is_of_keys ? p.seq_k.seqlen : p.seq_q.seqlen, columns, back,
                [&](int, int h, int r) {
                  return (int64_t(first[size_t(entry)]) + r) * heads * columns + h * columns;
                });
    });
  }
};

}  // namespace packed
