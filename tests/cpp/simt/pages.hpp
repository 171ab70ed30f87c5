// Keys of dense or packed calls in pages, for kernels that take pages.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "core/mask.hpp"
#include "simt/packed.hpp"

namespace packed {

using cutlass_attn::IntervalMask;

struct PageLayout {
  int page_size = 13;
  int gap = 16;         // after the rows of V, so that the strides of V and K differ
  bool halves = false;  // a page has its rows of K, then its rows of V, in one tensor
};

// Pages are in an irregular order. Rows beyond the last key, keys that no query sees, and a page of
// no sequence are NaN; the table names that page where a sequence has none.
struct Paged {
  Problem problem;
  PageLayout const layout;
  int const each;  // table entries per batch entry
  std::vector<int32_t> table, used;
  Rows k, v;

  explicit Paged(Problem const& p, PageLayout layout = {})
      : problem(p),
        layout(layout),
        each((p.seq_k.seqlen + layout.page_size - 1) / layout.page_size),
        table(size_t(p.batch * each)),
        k((p.batch * each + 1) * page(p) + 1),
        v(layout.halves ? 0 : (p.batch * each + 1) * page_v(p) + 1) {
    int const count = int(table.size()) + 1;
    std::vector<int32_t> numbers(static_cast<size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), std::mt19937(1));
    for (int b = 0; b < p.batch; ++b) {
      used.push_back(keys(p, b));
      for (int i = 0; i < each; ++i) {
        int const entry = b * each + i;
        bool const has_keys = i * layout.page_size < used.back();
        table[size_t(entry)] = numbers[size_t(has_keys ? entry : count - 1)];
      }
    }
    put(k, 0, problem.k, p.k, row_k(p), p.head_dim, page(p));
    if (layout.halves) {
      put(k, layout.page_size * row_k(p), problem.v, p.v, row_v(p), p.head_dim_v, page(p));
    } else {
      put(v, 0, problem.v, p.v, row_v(p), p.head_dim_v, page_v(p));
    }
    problem.kv = {table.data(), each, layout.page_size, count};
    problem.seq_k = {};
    problem.seq_k.seqused = used.data();
    problem.seq_k.seqlen = each * layout.page_size;
  }
  Paged(Paged const&) = delete;

 private:
  int64_t row_k(Problem const& p) const { return int64_t(p.num_heads_kv) * p.head_dim; }
  int64_t row_v(Problem const& p) const {
    return int64_t(p.num_heads_kv) * p.head_dim_v + layout.gap;
  }
  int64_t page_v(Problem const& p) const { return layout.page_size * row_v(p); }
  int64_t page(Problem const& p) const {
    return layout.page_size * row_k(p) + (layout.halves ? page_v(p) : 0);
  }

  static int first_key(Problem const& p, int b) {
    return p.seq_k.cu_seqlens ? p.seq_k.cu_seqlens[b] : 0;
  }
  static int keys(Problem const& p, int b) {
    if (p.seq_k.seqused) return p.seq_k.seqused[b];
    return p.seq_k.cu_seqlens ? p.seq_k.cu_seqlens[b + 1] - first_key(p, b) : p.seq_k.seqlen;
  }
  static int queries(Problem const& p, int b) {
    int32_t const* const cu = p.seq_q.cu_seqlens;
    return cu ? cu[b + 1] - cu[b] : p.seq_q.seqlen;
  }

  void put(Rows& rows, int64_t offset, Operand& here, Operand const& there, int64_t row,
           int columns, int64_t page) const {
    for (int b = 0; b < problem.batch; ++b) {
      auto const at = [&](int r) {
        int64_t const number = table[size_t(b * each + r / layout.page_size)];
        return offset + number * page + r % layout.page_size * row;
      };
      Operand one = there;
      one.data = static_cast<uint16_t*>(there.data) + b * there.batch_stride +
                 first_key(problem, b) * there.row_stride;
      rows.move(one, 1, problem.num_heads_kv, used[size_t(b)], columns, false,
                [&](int, int h, int r) { return at(r) + h * columns; });
      forget_unseen(rows, b, int64_t(problem.num_heads_kv) * columns, at);
    }
    here = {rows.memory.data() + offset, page, columns, row, there.dtype};
  }
  // Pages that a window or chunk has left behind may belong to other sequences by now.
  template <class At>
  void forget_unseen(Rows& rows, int b, int64_t row, At const& at) const {
    int const count = queries(problem, b);
    IntervalMask const mask(problem.mask, {count, used[size_t(b)]});
    for (int key = 0; key < used[size_t(b)]; ++key) {
      bool is_seen = false;
      for (int q = 0; q < count; ++q) is_seen |= mask.visible(q, key);
      if (!is_seen) std::fill_n(rows.memory.begin() + at(key), row, Rows::kNaN);
    }
  }
};

}  // namespace packed
