// One attention call as plain data: views of its operands, and its options.
//
// Python, C++ users and tests fill this struct, and kernels get it by value. It knows nothing of
// torch, CUTLASS or the GPU.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "facts.hpp"  // generated: DType, Accumulate, Quantize, limits

namespace cutlass_attn {

// "No limit" for window_left and window_right.
inline constexpr int32_t kUnbounded = -1;

// A 4-d operand (batch, heads, rows, columns) with contiguous columns. Strides count elements and
// may be zero (broadcast) or negative. Offsets are 64-bit.
struct Operand {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  DType dtype = DType::kFloat16;
  // Dequantization factor: value = stored number x scale. Head stride 1: one float per head; 0: one
  // for all heads. Null: no scale.
  float const* scale = nullptr;
  int64_t scale_head_stride = 0;
};

// An operand with one entry per logit, (batch, num_heads_q, seqlen_q, seqlen_k). Strides count
// elements; a stride of 0 broadcasts. Null address: the call has no such operand.
struct PerLogit {
  void const* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t key_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

// Number of rows of each batch entry, and their position. Addresses are on the device that runs the
// call. Masks, ALiBi and dropout count rows from the first one after leftpad.
struct Sequences {
  int32_t seqlen = 0;  // rows of every entry; with one of the arrays below, the maximum
  int32_t const* cu_seqlens = nullptr;  // (batch + 1): packed rows; first row of each entry
  int32_t const* seqused = nullptr;     // (batch): rows of an entry from here on are ignored
  int32_t const* leftpad = nullptr;     // (batch): rows of an entry before this one are ignored
  int32_t total = 0;                    // rows of the packed operand; at least cu_seqlens[batch]

  // Whether an unpacked batch has rows that are ignored.
  CA_HOST_DEVICE bool is_padded() const { return !cu_seqlens && (seqused || leftpad); }

  // Rows of the operand per index of its batch dimension.
  CA_HOST_DEVICE int32_t rows() const { return cu_seqlens ? total : seqlen; }
};

// Where the rows of K and V are: at the strides of their operands, or in pages. A page is one batch
// index of page_size rows.
struct KvStore {
  int32_t const* block_table = nullptr;  // (batch, pages of an entry): page numbers
  int64_t block_table_stride = 0;
  int32_t page_size = 0;
  int32_t num_pages = 0;  // in the pool
  // Per query a list of rows, (batch, seqlen_q, seqlen_k): key j is row `indices` (page x page_size
  // + row) of all pages instead of row j of the entry. An index out of range is no key. With a
  // block table: row `indices` of the entry, and no key from list_seqlens on. Without: pages lie at
  // the operands' batch strides.
  int32_t const* indices = nullptr;
  int64_t indices_batch_stride = 0;
  int64_t indices_query_stride = 0;
  int32_t const* list_seqlens = nullptr;  // (batch): rows of an entry, with a block table

  // Whether the batch stride of K and V is a page stride.
  CA_HOST_DEVICE bool has_pages() const { return block_table || indices; }
};

// From the product s = q.k to the logit: softmax_scale * s, then softcap * tanh(. / softcap) if
// softcap > 0, then - alibi_slopes[h] * |distance from the diagonal| + bias.
struct Logits {
  float softmax_scale = 1.0f;
  float softcap = 0.0f;
  float const* alibi_slopes = nullptr;  // (num_heads_q), or (batch, num_heads_q) with a stride
  int64_t alibi_batch_stride = 0;
  PerLogit bias;  // dtype bias_dtype: that of q, or float32
  DType bias_dtype = DType::kFloat16;
  bool has_float64_slopes = false;  // slopes are double; only with float64 operands
  // A user's function of the logit, named by RunOptions, is applied last.
  bool has_score_mod = false;
  // One logit per query head that joins the softmax denominator and has no key or value.
  float const* sinks = nullptr;  // (num_heads_q)
};

// The diagonal of query q is key q + seqlen_k - seqlen_q + diagonal_shift (0: bottom-right aligned;
// seqlen_q - seqlen_k: top-left aligned). The query sees window_left keys before that key and
// window_right keys after it; causal is window_right = 0. ALiBi is 0 on the diagonal.
// attention_chunk cuts the keys into chunks of that size, from key 0 on; a query sees only keys in
// the chunk of its diagonal key.
struct Mask {
  int32_t window_left = kUnbounded;
  int32_t window_right = kUnbounded;
  bool causal = false;
  int64_t diagonal_shift = 0;
  int32_t attention_chunk = 0;  // 0: no chunks
  PerLogit elements;            // bytes, 0: masked; intersected with the interval above
};

// Dropout of softmax weights: see core/dropout.hpp.
struct Dropout {
  float p = 0.0f;  // probability that a weight becomes 0, in [0, 1]
  // (2): seed and offset, on the device that runs the kernel; not read and may be null if p is 0.
  uint64_t const* rng_state = nullptr;
  // rng_state is (6): the call is a part of a larger one and draws its mask there. The number of
  // heads of the larger call follows, and the first head, query (a multiple of 16) and key (of 32)
  // of the part.
  bool is_part = false;
};

// What a backward pass reads in addition to the operands of the forward call, and what it writes.
// `o` and softmax_lse of the forward call are inputs here. Gradients have the dtype of q unless
// stated otherwise. Rows that belong to no sequence are not written. With batch = 0 or no query
// heads nothing is written.
struct Gradients {
  Operand o;  // input, gradient of o: (batch, num_heads_q, seqlen_q, head_dim_v)
  float const* softmax_lse = nullptr;  // input, gradient of the LSE, in its layout; null: zero
  // Outputs. Null address: not wanted.
  Operand q;                           // (batch, num_heads_q,  seqlen_q, head_dim)
  Operand k;                           // (batch, num_heads_kv, seqlen_k, head_dim)
  Operand v;                           // (batch, num_heads_kv, seqlen_k, head_dim_v)
  PerLogit bias;                       // summed over the broadcast dimensions, whose stride is 0
  DType bias_dtype = DType::kFloat32;  // dtype of grad bias: float32, or a 16-bit q's
  float* sinks = nullptr;              // (num_heads_q)
  // Bitwise reproducible, whatever the order of blocks.
  bool deterministic = false;
};

// Scalars of a call with float64 operands. Logits holds them rounded to float.
struct Float64Scalars {
  double softmax_scale = 1.0;
  double softcap = 0.0;
};

// With float64 operands, the LSE, its gradient, max_logits, sinks, and the gradients of sinks and
// bias are double although declared float.
struct Problem {
  // Operands. Messages call `o` by its Python name, `out`. With cu_seqlens, rows are those of all
  // batch entries and batch strides are 0; softmax_lse is then (num_heads_q, seq_q.total).
  Operand q;                     // (batch, num_heads_q,  seqlen_q, head_dim)
  Operand k;                     // (batch, num_heads_kv, seqlen_k, head_dim)
  Operand v;                     // (batch, num_heads_kv, seqlen_k, head_dim_v)
  Operand o;                     // (batch, num_heads_q,  seqlen_q, head_dim_v)
  float* softmax_lse = nullptr;  // (batch, num_heads_q, seqlen_q) contiguous, or null: not wanted
  // The largest logit of each query, without the sink; -inf if it sees no key. Otherwise as
  // softmax_lse.
  float* max_logits = nullptr;

  int32_t batch = 0;
  int32_t num_heads_q = 0;
  int32_t num_heads_kv = 0;  // divides num_heads_q; query head h reads KV head h / (Hq / Hkv)
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;
  Sequences seq_q, seq_k;
  KvStore kv;

  Logits logits;
  Mask mask;
  Dropout dropout;

  // Only kernels with this kind of accumulator run the call.
  Accumulate accumulate = Accumulate::kFloat32;
  // Only kernels with this kind of 8-bit products run the call (core/quantize.hpp).
  Quantize quantize = Quantize::kNone;

  // Thread blocks that share the keys of a batch entry. 0: chosen for the GPU.
  int32_t num_splits = 0;
  // Keys per split, in place of num_splits. The keys of a tile of rows are then split in one way,
  // whatever else is in the batch. 0: num_splits applies.
  int32_t split_size = 0;

  // For 8-bit products: heads with a larger predicted error run in 16 bits (core/predict.hpp). 0:
  // no limit.
  float max_error = 0.0f;

  // Whether k and v are rounded by one call and used by others (prequantize.hpp); host only.
  bool is_prequantized = false;

  // Set for a backward pass; host only: kernels have it in their own parameters.
  Gradients const* grad = nullptr;

  // Set for float64 operands; host only. Null: Logits has the scalars.
  Float64Scalars const* float64 = nullptr;

  // Sets the dtype of all four operands.
  void set_dtype(DType dtype) { q.dtype = k.dtype = v.dtype = o.dtype = dtype; }
};

}  // namespace cutlass_attn
