// Attention problems with their fp64 answers, to judge any kernel.
//
// Masks, scores, softmax and number formats are stated here again, in doubles and in plain loops,
// and share no code with the library: an oracle that shared the kernel's mask could not catch a
// wrong mask. Only the choice of dropped weights comes from core/dropout.hpp, which has its own
// tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"

namespace attention_case {

using cutlass_attn::Accumulate;
using cutlass_attn::DType;
using cutlass_attn::kUnbounded;
using cutlass_attn::Problem;
using cutlass_attn::Quantize;

enum class Layout {
  kPadded,      // (B, H, S, D); rows and sequences have gaps behind them, filled with NaN
  kContiguous,  // (B, H, S, D)
  kTransposed,  // (B, S, H, D)
};

struct Case {
  std::string name;
  int seqlen_q, seqlen_k;
  int batch = 1, num_heads_q = 1, num_heads_kv = 1;
  bool causal = false;
  int window_left = kUnbounded, window_right = kUnbounded;
  int64_t diagonal_shift = 0;
  int attention_chunk = 0;
  float softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  float softcap = 0;
  float magnitude = 1;     // of Q
  unsigned seed = 1;       // of Q, K and V: with equal seeds, rows at equal positions are equal
  int nan_key = -1;        // a row of K that is NaN
  bool fp8_kv = false;     // K and V are float8_e4m3fn numbers
  bool latent_kv = false;  // V is a view of the first columns of K
  Layout layout = Layout::kPadded;
  char const* unaligned = "";         // operands of "qkvo" with odd addresses and odd strides
  int head_dim = 64, head_dim_v = 0;  // 0: head_dim

  // Operands with one entry per logit: dimensions along which they vary, some of "bhqk"; they
  // broadcast over the others. Null: absent. The layout determines their order in memory.
  char const* bias = nullptr;
  bool bias_is_fp32 = false;    // or of the dtype
  char const* mask = nullptr;   // masks a third of the keys, and all keys of every fifth query
  int mask_block = 0;           // or a third of the blocks of this many queries and keys
  char const* alibi = nullptr;  // slopes along "h" or "bh"
  bool sinks = false;           // the sink of head 1 is -inf
  float dropout_p = 0;
  bool max_logits = false;  // an output

  // Accumulator of the kernel. Kernels with fp16 accumulation implement none of the options from
  // `bias` on except sinks.
  Accumulate accumulate = Accumulate::kFloat32;
  // q and k are rounded to int8; the answer is that of the rounded operands.
  Quantize quantize = Quantize::kNone;
};

// Each case has a reason. Sizes are ragged against tiles of 64 unless the name says otherwise.
std::vector<Case> cases(int head_dim);

// A few cases that reach every line of a kernel, for slow builds.
std::vector<Case> few_cases(int head_dim);

// The options from `bias` on, each alone and together.
std::vector<Case> option_cases(int head_dim);

// A few of these, for slow builds.
std::vector<Case> few_option_cases(int head_dim);
std::vector<Case> few_alibi_cases(int head_dim);  // with several tiles of keys
std::vector<Case> few_dropout_cases(int head_dim);
std::vector<Case> few_dropout_term_cases(int head_dim);  // with softcap and ALiBi
std::vector<Case> few_bias_cases(
    int head_dim);  // of 16 bits, with entries of two keys side by side
std::vector<Case> few_any_bias_cases(int head_dim);  // of float32, of odd lengths, strided
std::vector<Case> few_mask_cases(int head_dim);  // tiles in which all, some, or no keys are seen
std::vector<Case> few_bias_mask_cases(int head_dim);
std::vector<Case> few_max_logit_cases(int head_dim);

// All of the three: long, for kernels that skip tiles by a map of the mask or copy a bias by tiles.
std::vector<Case> logit_cases(int head_dim);

// Few queries with many keys, which decode kernels split. The first cases reach every line of a
// kernel.
std::vector<Case> decode_cases(int head_dim);

// Head dimensions that only kernels without a fixed head dim run.
std::vector<Case> odd_head_dims();

class SolvedCase {
 public:
  SolvedCase(Case const& what, DType dtype);

  // The call. Its outputs belong to this object and are overwritten with garbage now.
  Problem call();

  // With fp16 accumulation, the unfused computation rounds its own sums to fp16 after every 8
  // products; sums of P V within 32 keys (derived in python/cutlass_attn/testing.py). LSE may be
  // off by the bound of these roundings.
  //
  // With q and k in int8, if only softmax follows, the unfused computation has exponents from one
  // multiply-add of a number as large as 1.5 * 2^23 (quantized/queries.hpp). The exponents and
  // LSE are off by up to one unit of the integer products.
  //
  // With P and V in 8 bits (int8, fp8), it rounds them as in core/quantize.hpp. LSE may be off by
  // two weights that are rounded the other way; in e4m3, whose steps depend on when the row max was
  // updated, by half a step of each.
  //
  // Empty if the outputs are right: the RMS error is within 1.5 times (twice with Q K^T in fp16),
  // and the largest error within twice, that of an unfused computation that rounds P and O to the
  // dtype; NaN is exactly where fp64 has it; nothing is written outside. Otherwise it says what is
  // wrong and where.
  std::string verdict() const;

  // All bytes of O, LSE and the largest logits, to compare runs.
  std::vector<char> outputs() const;

 private:
  // A 4-d operand of the case: storage in the dtype, and the position of an element.
  struct Operand {
    std::vector<char> bytes;
    int rows, columns;
    int64_t first;  // element in memory
    int64_t batch_stride, head_stride, row_stride;

    int64_t index(int b, int h, int r, int d) const {
      return first + b * batch_stride + h * head_stride + r * row_stride + d;
    }
  };

  // A bias, a mask or slopes: numbers or bytes of a 4-d array, some of whose strides may be 0.
  struct Entries {
    std::vector<char> bytes;
    std::vector<double> values;  // of each element in memory
    int64_t strides[4] = {};     // batch, head, query, key

    double at(int b, int h, int q, int k) const {
      return values[b * strides[0] + h * strides[1] + q * strides[2] + k * strides[3]];
    }
    cutlass_attn::PerLogit ref() const {
      return {bytes.data(), strides[0], strides[1], strides[2], strides[3]};
    }
  };

  Entries make_entries(char const* dims) const;
  void make_terms();
  double logit(int b, int h, int q, int k, double dot) const;
  bool visible(int b, int h, int q, int k) const;
  Operand make(char name, int heads, int rows, int columns, double fill) const;
  void randomize(Operand& x, double magnitude, unsigned seed);
  double load(Operand const& x, int64_t index) const;
  void store(Operand& x, int64_t index, double value) const;
  std::vector<double> values(Operand const& x) const;
  cutlass_attn::Operand ref(Operand& x) const;
  void solve();
  struct Int8Scales {
    std::vector<double> shift;       // subtracted from K: (batch, KV head, column)
    std::vector<double> of_queries;  // (batch, head, query)
    std::vector<double> of_keys;     // (batch, KV head, tile of 64 keys, group)
  };
  Int8Scales round_to_int8(std::vector<double>& q, std::vector<double>& k) const;
  void round_weights(std::vector<double> const& p, std::vector<double> const& v, int b, int h_kv,
                     double sum, double* row) const;
  std::vector<double> round_values_fp8(std::vector<double> const& v) const;
  void round_weights_fp8(std::vector<double> const& p, std::vector<double> const& v, int b,
                         int h_kv, double sum, double* row) const;
  double rounded_dot(double const* q, double const* k, double& bound) const;
  void round_sums(std::vector<double> const& logits, std::vector<double> const& v, int b, int h_kv,
                  double sink, double* row) const;

  Case case_;
  DType dtype_;
  Operand q_, k_, v_, o_;
  Entries bias_, mask_, slopes_;
  std::vector<float> sinks_;
  // With the place of a part of a larger call.
  uint64_t rng_state_[6] = {0x123456789abcdef0u, 0x0fedcba987654321u, 100, 30, 16 * 5, 32 * 7};
  std::vector<float> lse_, max_logits_;
  std::vector<double> exact_o_, unfused_o_, exact_lse_, exact_max_;  // (B, Hq, Sq[, Dv])
  std::vector<double> lse_bound_;  // how far fp16 accumulation may move LSE
};

}  // namespace attention_case
