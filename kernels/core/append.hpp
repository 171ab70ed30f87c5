// The problem of append_kv() as plain data: new rows of K and V that are written to a cache.
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace cutlass_attn {

// Rotary position embedding (arXiv 2104.09864) of the first `dim` columns of a row. Pair j is
// columns (2 j, 2 j + 1) or (j, j + dim / 2). It is rotated by an angle that depends on the row's
// position; the tables hold its cosine and sine.
struct Rotary {
  void const* cos = nullptr;  // (positions, dim / 2), dtype of the rows; null: no rotation
  void const* sin = nullptr;
  int64_t cos_stride = 0;  // between positions, in elements
  int64_t sin_stride = 0;
  int32_t positions = 0;
  int32_t dim = 0;
  bool interleaved = true;  // pair j is columns (2 j, 2 j + 1)
};

// slot_mapping or cache_seqlens determines where row i of batch entry b is written.
//   slot_mapping: row slot % page_size of page slot / page_size. A negative slot skips the row.
//   cache_seqlens: row cache_seqlens[b] + i of the entry, in the page that its block table names,
//   or in page b without a block table.
// Rows beyond the cache are an error on the CPU, and skipped on a GPU.
struct AppendProblem {
  Operand k, v;              // new rows, (batch, num_heads_kv, seqlen, head_dim[_v])
  Operand k_cache, v_cache;  // (pages, num_heads_kv, page_size, head_dim[_v]), in the dtype of the
                             // new rows or float8_e4m3fn; stored value x scale = new value. Or
                             // k_cache in a token format, without V
  KvStore kv;                // without a block table, batch entry b is page b
  int32_t cache_rows = 0;    // capacity of an entry
  int32_t const* cache_seqlens = nullptr;  // (batch): rows in the cache before the call
  int64_t const* slot_mapping = nullptr;   // (batch x seqlen)

  int32_t batch = 0;
  int32_t seqlen = 0;  // new rows per entry
  int32_t num_heads_kv = 0;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;

  // Output for calls with cache_seqlens, (batch): rows in the cache after the call. Null: not
  // wanted.
  int32_t* seqlens_after = nullptr;
  // Rotation. k is rotated by the position of the row that it is written to. Queries are rotated
  // from q to q_rotated (batch, num_heads_q, seqlen_q, head_dim): query i by the position of new
  // key i, or all queries by the position of the first new key.
  Rotary rotary;
  Operand q, q_rotated;
  int32_t num_heads_q = 0;
  int32_t seqlen_q = 0;
  bool q_advances = true;
};

}  // namespace cutlass_attn
