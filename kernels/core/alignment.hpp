// Alignment of a call's operands. It determines how many bytes one load or copy can move.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

// Bitwise OR of an operand's address and its strides in bytes. The stride of a dimension of size 1
// does not count.
CA_HOST_DEVICE uint64_t address_bits(bool has_batches, Operand const& t, int heads, int rows,
                                     int element_bytes) {
  int64_t const strides = (has_batches ? t.batch_stride : 0) | (heads > 1 ? t.head_stride : 0) |
                          (rows > 1 ? t.row_stride : 0);
  return reinterpret_cast<uint64_t>(t.data) | uint64_t(strides) * uint64_t(element_bytes);
}

// Bitwise OR over q, k, v and o. Its lowest set bit is the alignment of all their rows.
// `kv_element_bytes`: element size of k and v.
CA_HOST_DEVICE uint64_t address_bits(Problem const& p, int element_bytes, int kv_element_bytes) {
  bool const has_batches = p.batch > 1, has_pages = p.kv.has_pages() || has_batches;
  return address_bits(has_batches, p.q, p.num_heads_q, p.seq_q.rows(), element_bytes) |
         address_bits(has_pages, p.k, p.num_heads_kv, p.seq_k.rows(), kv_element_bytes) |
         address_bits(has_pages, p.v, p.num_heads_kv, p.seq_k.rows(), kv_element_bytes) |
         address_bits(has_batches, p.o, p.num_heads_q, p.seq_q.rows(), element_bytes);
}
CA_HOST_DEVICE uint64_t address_bits(Problem const& p, int element_bytes) {
  return address_bits(p, element_bytes, element_bytes);
}

}  // namespace cutlass_attn
