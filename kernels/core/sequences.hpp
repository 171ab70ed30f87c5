// Where the rows of a batch entry are, and how many. A kernel asks once per block, and reads no
// sequence length of the problem itself.
//
//   DenseSeqInfo    all entries have equal lengths; nothing is read from memory
//   VarlenSeqInfo   packed rows (cu_seqlens), or entries with ignored rows (seqused, leftpad);
//                   dense calls as well
//   DenseKv         rows of a head of K or V at a constant stride
//   PagedKv         rows in the pages of a block table, or all pages; dense calls as well
//   StoredKv        PagedKv of Element, of E4M3 or in a token format, as the call stores them
//   KeyList         the rows that are the keys of a query, for calls with lists
#pragma once

#include <cstdint>

#include "core/divide.hpp"
#include "core/e4m3.hpp"
#include "core/macros.hpp"
#include "core/problem.hpp"
#include "core/token_format.hpp"

namespace cutlass_attn {

// Lengths of one batch entry.
struct SeqLens {
  int32_t q, k;
};

struct DenseSeqInfo {
  int32_t batch;

  DenseSeqInfo() = default;
  CA_HOST_DEVICE DenseSeqInfo(Problem const&, int32_t batch) : batch(batch) {}

  CA_HOST_DEVICE SeqLens lens(Problem const& p) const { return {p.seq_q.seqlen, p.seq_k.seqlen}; }

  // Address of row 0 of a head: of q or o (queries), of k or v (keys).
  template <class Element>
  CA_HOST_DEVICE Element* queries(Operand const& t, int head) const {
    return static_cast<Element*>(t.data) + batch * t.batch_stride + head * t.head_stride;
  }
  template <class Element>
  CA_HOST_DEVICE Element* keys(Operand const& t, int head) const {
    return queries<Element>(t, head);
  }

  // Index of a query in softmax_lse.
  CA_HOST_DEVICE int64_t lse(Problem const& p, int head, int query) const {
    return (int64_t(batch) * p.num_heads_q + head) * p.seq_q.seqlen + query;
  }
};

// Packed operands have no batch stride; their softmax_lse is (num_heads_q, seq_q.total).
struct VarlenSeqInfo {
  int32_t batch;
  int32_t first_q, first_k;  // rows before this entry's: of earlier entries if packed, and leftpad
  SeqLens seqlens;

  CA_HOST_DEVICE VarlenSeqInfo(Problem const& p, int32_t batch)
      : batch(batch),
        first_q(first_of(p.seq_q, batch)),
        first_k(first_of(p.seq_k, batch)),
        seqlens{length_of(p.seq_q, batch), length_of(p.seq_k, batch)} {}

  CA_HOST_DEVICE SeqLens lens(Problem const&) const { return seqlens; }

  template <class Element>
  CA_HOST_DEVICE Element* queries(Operand const& t, int head) const {
    return row0<Element>(t, head, first_q);
  }
  template <class Element>
  CA_HOST_DEVICE Element* keys(Operand const& t, int head) const {
    return row0<Element>(t, head, first_k);
  }

  CA_HOST_DEVICE int64_t lse(Problem const& p, int head, int query) const {
    if (p.seq_q.cu_seqlens == nullptr) return DenseSeqInfo(p, batch).lse(p, head, first_q + query);
    return int64_t(head) * p.seq_q.total + first_q + query;
  }

 private:
  template <class Element>
  CA_HOST_DEVICE Element* row0(Operand const& t, int head, int32_t first) const {
    return static_cast<Element*>(t.data) + batch * t.batch_stride + head * t.head_stride +
           first * t.row_stride;
  }

  CA_HOST_DEVICE static int32_t first_of(Sequences const& s, int32_t batch) {
    return (s.cu_seqlens ? s.cu_seqlens[batch] : 0) + padding_of(s, batch);
  }
  // At least 0: nothing checks the lengths of a GPU call, which may be inconsistent.
  CA_HOST_DEVICE static int32_t length_of(Sequences const& s, int32_t batch) {
    int32_t const all = s.cu_seqlens ? s.cu_seqlens[batch + 1] - s.cu_seqlens[batch] : s.seqlen;
    int32_t const end = s.seqused && s.seqused[batch] < all ? s.seqused[batch] : all;
    int32_t const length = end - padding_of(s, batch);
    return length > 0 ? length : 0;
  }
  CA_HOST_DEVICE static int32_t padding_of(Sequences const& s, int32_t batch) {
    return s.leftpad && s.leftpad[batch] > 0 ? s.leftpad[batch] : 0;
  }
};

// Dequantization factor of a head.
CA_HOST_DEVICE float scale_of(Operand const& t, int head) {
  return t.scale ? t.scale[head * t.scale_head_stride] : 1.0f;
}

template <class Element>
struct DenseKv {
  Element const* first;
  int64_t row_stride;

  template <class SeqInfo>
  CA_HOST_DEVICE DenseKv(Problem const&, SeqInfo const& seq, Operand const& t, int head)
      : first(seq.template keys<Element const>(t, head)), row_stride(t.row_stride) {}

  CA_HOST_DEVICE Element const* row(int key) const { return first + key * row_stride; }
};

template <class Element>
struct PagedKv {
  Element const* first;
  int64_t row_stride, page_stride;
  int32_t const* pages;  // of this entry; null: dense, or all pages in order
  int32_t page_size;
  bool is_dense;

  template <class SeqInfo>
  CA_HOST_DEVICE PagedKv(Problem const& p, SeqInfo const& seq, Operand const& t, int head)
      : first(p.kv.has_pages() ? static_cast<Element const*>(t.data) + head * t.head_stride
                               : seq.template keys<Element const>(t, head)),
        row_stride(t.row_stride),
        page_stride(t.batch_stride),
        pages(p.kv.block_table ? p.kv.block_table + seq.batch * p.kv.block_table_stride : nullptr),
        page_size(p.kv.page_size),
        is_dense(!p.kv.has_pages()) {}

  CA_HOST_DEVICE Element const* row(int key) const {
    if (is_dense) return first + key * row_stride;
    int const page = key / page_size;
    return first + (pages ? pages[page] : page) * page_stride + key % page_size * row_stride;
  }
};

struct KeyList {
  int32_t const* rows;  // null: the call has no lists
  int64_t num_rows;     // of all pages, or of the entry

  CA_HOST_DEVICE KeyList(Problem const& p, int batch, int query)
      : rows(p.kv.indices ? p.kv.indices + batch * p.kv.indices_batch_stride +
                                query * p.kv.indices_query_stride
                          : nullptr),
        num_rows(p.kv.list_seqlens ? p.kv.list_seqlens[batch]
                                   : int64_t(p.kv.num_pages) * p.kv.page_size) {}

  // Row of key j, numbered as in PagedKv; -1: no key. Without lists: j.
  CA_HOST_DEVICE int32_t operator()(int j) const {
    if (rows == nullptr) return j;
    int32_t const row = rows[j];
    return row >= 0 && row < num_rows ? row : -1;
  }
};

template <class Element>
struct StoredKv {
  PagedKv<Element> rows;
  PagedKv<E4M3> rows_fp8;
  DType dtype;

  template <class SeqInfo>
  CA_HOST_DEVICE StoredKv(Problem const& p, SeqInfo const& seq, Operand const& t, int head)
      : rows(p, seq, t, head), rows_fp8(p, seq, t, head), dtype(t.dtype) {}

  // Calls visit(row) with the address of a key's row.
  template <class Visit>
  CA_HOST_DEVICE void with_row(int key, Visit&& visit) const {
    if (is_token_format(dtype)) {
      visit(TokenRow<Element>{format_of(dtype), token(key)});
    } else if (dtype == DType::kFloat8E4M3) {
      visit(rows_fp8.row(key));
    } else {
      visit(rows.row(key));
    }
  }

 private:
  CA_HOST_DEVICE TokenBytes token(int key) const {
    PagedKv<E4M3> const& kv = rows_fp8;
    int const page = kv.is_dense ? 0 : key / kv.page_size;
    int64_t const number = kv.pages ? kv.pages[page] : page;
    return {format_of(dtype), reinterpret_cast<uint8_t const*>(kv.first + number * kv.page_stride),
            kv.page_size, key - page * kv.page_size};
  }
};

}  // namespace cutlass_attn
