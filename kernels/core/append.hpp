// The problem of append_kv() as plain data: new rows of K and V that are written to a cache.
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace cutlass_attn {

// Rotary position embedding (arXiv 2104.09864) of the first `dim` columns of a row. Pair j, columns
// (2 j, 2 j + 1) or (j, j + dim / 2), is rotated by the angle whose cosine and sine are given for
// the row's position.
struct Rotary {
  void const* cos = nullptr;  // (positions, dim / 2) of the rows' dtype; null: no rotation
  void const* sin = nullptr;
  int64_t cos_stride = 0;  // between positions, in elements
  int64_t sin_stride = 0;
  int32_t positions = 0;
  int32_t dim = 0;
  bool interleaved = true;  // columns (2 j, 2 j + 1) are a pair
};

// Either slot_mapping or cache_seqlens determines where row i of entry b is written. With
// slot_mapping: to row slot % page_size of page slot / page_size; a negative slot skips the row.
// With cache_seqlens: to row cache_seqlens[b] + i of the entry; the entry's block table, or its
// number, gives the page. Rows beyond the cache are an error on the CPU, and skipped on a GPU.
struct AppendProblem {
  Operand k, v;              // new rows, (batch, num_heads_kv, seqlen, head_dim[_v])
  Operand k_cache, v_cache;  // (pages, num_heads_kv, page_size, head_dim[_v]), in the dtype of the
                             // new rows or float8_e4m3fn; a new row is its stored row times
                             // the scale. Or k_cache in a format of tokens, without V
  KvStore kv;                // without a block table, batch entry b is page b
  int32_t cache_rows = 0;    // capacity of an entry
  int32_t const* cache_seqlens = nullptr;  // (batch): rows that an entry has before
  int64_t const* slot_mapping = nullptr;   // (batch x seqlen)

  int32_t batch = 0;
  int32_t seqlen = 0;  // new rows of an entry
  int32_t num_heads_kv = 0;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;

  // With cache_seqlens: the number of rows that entries have afterwards, (batch); null: not
  // requested.
  int32_t* seqlens_after = nullptr;
  // Rotation: of k by the position of the row that it is written to; and of queries, from q to
  // q_rotated (batch, num_heads_q, seqlen_q, head_dim), by the position of the new key with the
  // query's number, or all by that of the first key.
  Rotary rotary;
  Operand q, q_rotated;
  int32_t num_heads_q = 0;
  int32_t seqlen_q = 0;
  bool q_advances = true;
};

}  // namespace cutlass_attn
