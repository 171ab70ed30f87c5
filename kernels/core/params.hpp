// What one attention call is: operands, dimensions and options, as plain data.
//
// The same struct is filled by Python, by C++ users, by the tests, and is handed to kernels by
// value. It knows nothing of torch, of CUTLASS or of the GPU.
#pragma once

#include <cstdint>

namespace cutlass_attn {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32 };

// What the tensor cores add products up in: fp32, or fp16 for Q K^T, for P V, or for both.
enum class Accumulate : int32_t { kFloat32, kFloat16Qk, kFloat16Pv, kFloat16 };

// Address and strides of a 4-d operand whose last dimension is contiguous. Strides count elements;
// they may be zero (broadcast) or negative, and the offsets they produce are 64-bit.
struct TensorRef {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// Address and strides, in elements, of an operand with one entry per logit,
// (batch, num_heads_q, seqlen_q, seqlen_k). A stride of 0 broadcasts; a null address: not there.
struct LogitRef {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t key_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

// "No limit" for window_left and window_right.
inline constexpr int32_t kUnbounded = -1;

inline constexpr int kMaxHeadDim = 512;
// So that a row number plus a few tiles is an int32_t.
inline constexpr int32_t kMaxSeqlen = 1 << 30;

// Calls with so many queries or fewer are decoding: they read K and V, and compute little. (As
// DECODE_QUERIES of python/cutlass_attn/bench/shapes.py.)
inline constexpr int32_t kMaxDecodeQueries = 16;

struct AttnParams {
  // Operands; messages call `o` by its name in Python, `out`.
  TensorRef q;                   // (batch, num_heads_q,  seqlen_q, head_dim)
  TensorRef k;                   // (batch, num_heads_kv, seqlen_k, head_dim)
  TensorRef v;                   // (batch, num_heads_kv, seqlen_k, head_dim_v)
  TensorRef o;                   // (batch, num_heads_q,  seqlen_q, head_dim_v), same dtype as q
  float* softmax_lse = nullptr;  // (batch, num_heads_q, seqlen_q) contiguous, or null: not wanted

  // Dimensions.
  DType dtype = DType::kFloat16;
  int32_t batch = 0;
  int32_t num_heads_q = 0;
  int32_t num_heads_kv = 0;  // divides num_heads_q; query head h reads KV head h / (Hq / Hkv)
  int32_t seqlen_q = 0;
  int32_t seqlen_k = 0;
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;

  // Score: softmax_scale * q.k, then softcap * tanh(. / softcap) when softcap > 0.
  float softmax_scale = 1.0f;
  float softcap = 0.0f;

  // Mask. Query q sits on key q + seqlen_k - seqlen_q + diagonal_shift (0: bottom-right aligned;
  // seqlen_q - seqlen_k: top-left aligned) and sees window_left keys before that one and
  // window_right keys after it; causal is window_right = 0. That key is also where ALiBi is 0.
  int32_t window_left = kUnbounded;
  int32_t window_right = kUnbounded;
  bool causal = false;
  int64_t diagonal_shift = 0;

  // Terms of a logit, after the softcap: - alibi_slopes[h] * |distance from the diagonal| + bias.
  const float* alibi_slopes = nullptr;  // (num_heads_q), or (batch, num_heads_q) with a stride
  int64_t alibi_batch_stride = 0;
  LogitRef bias;  // of bias_dtype: that of q, or float32
  DType bias_dtype = DType::kFloat16;
  LogitRef mask;  // bytes, 0: hidden; what the interval above hides stays hidden

  // A logit per query head that joins the softmax's denominator, with no key or value of its own.
  const float* sinks = nullptr;  // (num_heads_q)

  // A kernel runs only the calls that ask for its kind of sums.
  Accumulate accumulate = Accumulate::kFloat32;

  // Dropout of softmax weights: see core/dropout.hpp.
  float dropout_p = 0.0f;               // probability that a weight becomes 0, in [0, 1]
  const uint64_t* rng_state = nullptr;  // (2): seed and offset, where the kernel runs; unread
                                        // and allowed to be null when dropout_p is 0

  // Named now, not implemented yet: check() answers kNotImplemented when one of these is set.
  const int32_t* cu_seqlens_q = nullptr;  // (batch + 1): first row of each packed sequence
  const int32_t* cu_seqlens_k = nullptr;  // (batch + 1)
  const int32_t* block_table = nullptr;   // (batch, max_blocks): pages of K and V
  int32_t num_splits = 1;                 // parts that the key sequence is cut into
};

}  // namespace cutlass_attn
