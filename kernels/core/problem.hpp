// What one attention call is: views of its operands and its options, as plain data.
//
// The same struct is filled by Python, by C++ users, by the tests, and is handed to kernels by
// value. It knows nothing of torch, of CUTLASS or of the GPU.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "facts.hpp"  // generated: DType, Accumulate, Quantize, limits

namespace cutlass_attn {

// "No limit" for window_left and window_right.
inline constexpr int32_t kUnbounded = -1;

// A 4-d operand (batch, heads, rows, columns) whose last dimension is contiguous. Strides count
// elements; they may be zero (broadcast) or negative, and the offsets they produce are 64-bit.
struct Operand {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  DType dtype = DType::kFloat16;
  // What the stored numbers are multiplied by, one float per head where the stride is 1, one for
  // all where it is 0. Null: they are as stored.
  float const* scale = nullptr;
  int64_t scale_head_stride = 0;
};

// An operand with one entry per logit, (batch, num_heads_q, seqlen_q, seqlen_k). Strides count
// elements; one of 0 broadcasts. A null address: not there.
struct PerLogit {
  void const* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t key_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

// How many rows each batch entry has, and where they are. All addresses are of the device that runs
// the call. Row 0 of an entry is its first one that counts, for masks, ALiBi and dropout.
struct Sequences {
  int32_t seqlen = 0;                   // of every entry; the most of any, with one of these:
  int32_t const* cu_seqlens = nullptr;  // (batch + 1): packed, the first row of each entry
  int32_t const* seqused = nullptr;     // (batch): one past the last row of an entry that counts
  int32_t const* leftpad = nullptr;     // (batch): rows of an entry before the first that counts
  int32_t total = 0;  // rows of the packed operand: as many as cu_seqlens says, or more

  // Whether entries of a batch of equal lengths have rows that do not count.
  CA_HOST_DEVICE bool is_padded() const { return !cu_seqlens && (seqused || leftpad); }

  // Of the operand, in each of its batch entries.
  CA_HOST_DEVICE int32_t rows() const { return cu_seqlens ? total : seqlen; }
};

// Where the rows of K and V are: at the strides of their operands, or in pages, each of which is a
// batch entry of page_size rows.
struct KvStore {
  int32_t const* block_table = nullptr;  // (batch, pages of an entry): numbers of pages
  int64_t block_table_stride = 0;
  int32_t page_size = 0;
  int32_t num_pages = 0;  // that there are
  // A list for each query, (batch, seqlen_q, seqlen_k): key j is not row j of the entry but row
  // `indices` of all pages, page x page_size + row, and no key where that is no row. With a block
  // table: row `indices` of the entry, and no key from list_seqlens on. Without: the pages are
  // those of the operands' batch strides.
  int32_t const* indices = nullptr;
  int64_t indices_batch_stride = 0;
  int64_t indices_query_stride = 0;
  int32_t const* list_seqlens = nullptr;  // (batch): rows of an entry, with a block table

  // Whether an operand's batch stride is that of pages.
  CA_HOST_DEVICE bool has_pages() const { return block_table || indices; }
};

// From the product s = q.k to the logit: softmax_scale * s, then softcap * tanh(. / softcap) when
// softcap > 0, then - alibi_slopes[h] * |distance from the diagonal| + bias.
struct Logits {
  float softmax_scale = 1.0f;
  float softcap = 0.0f;
  float const* alibi_slopes = nullptr;  // (num_heads_q), or (batch, num_heads_q) with a stride
  int64_t alibi_batch_stride = 0;
  PerLogit bias;  // of bias_dtype: that of q, or float32
  DType bias_dtype = DType::kFloat16;
  bool has_float64_slopes = false;  // slopes are double, of float64 operands alone
  // A user's function of what comes of that, which RunOptions name.
  bool has_score_mod = false;
  // A logit per query head that joins the softmax's denominator, with no key or value of its own.
  float const* sinks = nullptr;  // (num_heads_q)
};

// Query q sits on key q + seqlen_k - seqlen_q + diagonal_shift (0: bottom-right aligned; seqlen_q -
// seqlen_k: top-left aligned) and sees window_left keys before that one and window_right keys after
// it; causal is window_right = 0. That key is also where ALiBi is 0. With attention_chunk it sees
// keys of its own key's chunk alone, of so many keys from key 0 on.
struct Mask {
  int32_t window_left = kUnbounded;
  int32_t window_right = kUnbounded;
  bool causal = false;
  int64_t diagonal_shift = 0;
  int32_t attention_chunk = 0;  // 0: no chunks
  PerLogit elements;            // bytes, 0: masked; what the interval above masks stays masked
};

// Dropout of softmax weights: see core/dropout.hpp.
struct Dropout {
  float p = 0.0f;                       // probability that a weight becomes 0, in [0, 1]
  uint64_t const* rng_state = nullptr;  // (2): seed and offset, where the kernel runs; unread and
                                        // allowed to be null when p is 0
};

// What a backward pass is given beside the operands of the forward call, of which `o` and
// softmax_lse are inputs then, and what it writes. Gradients have the dtype of q unless said
// otherwise. Rows that belong to no sequence are not written, and nothing is without batch entries
// or query heads.
struct Gradients {
  Operand o;                           // of the output: (batch, num_heads_q, seqlen_q, head_dim_v)
  float const* softmax_lse = nullptr;  // of the LSE, in its layout; null: it has none
  // To write, each with a null address where it is not wanted.
  Operand q;                           // (batch, num_heads_q,  seqlen_q, head_dim)
  Operand k;                           // (batch, num_heads_kv, seqlen_k, head_dim)
  Operand v;                           // (batch, num_heads_kv, seqlen_k, head_dim_v)
  PerLogit bias;                       // what broadcast logits add up to; a stride of 0 broadcasts
  DType bias_dtype = DType::kFloat32;  // of that gradient: this, or q's of 16 bits
  float* sinks = nullptr;              // (num_heads_q)
  // The same bits every time, whatever the order of blocks.
  bool deterministic = false;
};

// Scalars of a call with float64 operands, which Logits have rounded to float.
struct Float64Scalars {
  double softmax_scale = 1.0;
  double softcap = 0.0;
};

// Of float64 operands, the LSE, its gradient, sinks and the gradients of sinks and bias are double
// where float is said here.
struct Problem {
  // Operands; messages call `o` by its name in Python, `out`. With cu_seqlens their rows are those
  // of all batch entries, and batch strides are 0; softmax_lse is then (num_heads_q, seq_q.total).
  Operand q;                     // (batch, num_heads_q,  seqlen_q, head_dim)
  Operand k;                     // (batch, num_heads_kv, seqlen_k, head_dim)
  Operand v;                     // (batch, num_heads_kv, seqlen_k, head_dim_v)
  Operand o;                     // (batch, num_heads_q,  seqlen_q, head_dim_v)
  float* softmax_lse = nullptr;  // (batch, num_heads_q, seqlen_q) contiguous, or null: not wanted

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

  // A kernel runs only the calls that ask for its kind of accumulators.
  Accumulate accumulate = Accumulate::kFloat32;
  // And its kind of products in 8 bits: see core/quantize.hpp.
  Quantize quantize = Quantize::kNone;

  int32_t num_splits =
      0;  // of the keys of a batch entry over thread blocks; 0: as many as the GPU wants
  // Keys of a split, in place of a number of splits: the keys that a tile of rows sees are divided
  // alike, whatever else is in the batch. 0: as num_splits says.
  int32_t split_size = 0;

  // Of products in 8 bits: heads whose predicted error is larger run in 16 bits (core/predict.hpp).
  // 0: none does.
  float max_error = 0.0f;

  // Of a backward pass alone, on the host: kernels have it in their own arguments.
  Gradients const* grad = nullptr;

  // Of float64 operands alone, on the host. Null: Logits have the scalars.
  Float64Scalars const* float64 = nullptr;

  // Of all four operands.
  void set_dtype(DType dtype) { q.dtype = k.dtype = v.dtype = o.dtype = dtype; }
};

}  // namespace cutlass_attn
