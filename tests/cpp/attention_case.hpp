// Attention problems with their fp64 answer, to judge any kernel by.
//
// Masks, scores, softmax and number formats are stated here once more, in doubles and in plain
// loops, and share no code with the library: an oracle that shared the kernel's mask could not
// catch a wrong mask. Only which weights dropout keeps comes from core/dropout.hpp, which has tests
// of its own.
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
  unsigned seed = 1;       // of Q, K and V: with the same one, rows of the same place are equal
  int nan_key = -1;        // a row of K that is NaN
  bool fp8_kv = false;     // K and V are numbers of float8_e4m3fn
  bool latent_kv = false;  // V is a view of the first columns of K
  Layout layout = Layout::kPadded;
  char const* unaligned = "";         // those of "qkvo" that lie at odd addresses with odd strides
  int head_dim = 64, head_dim_v = 0;  // 0: head_dim

  // Operands with an entry per logit: the dimensions they vary along, some of "bhqk", the others
  // being broadcast; null: not there. The layout tells how they lie in memory.
  char const* bias = nullptr;
  bool bias_is_fp32 = false;    // or of the dtype
  char const* mask = nullptr;   // hides a third of the keys, and every fifth query's all
  int mask_block = 0;           // or a third of the blocks of so many queries and keys
  char const* alibi = nullptr;  // slopes along "h" or "bh"
  bool sinks = false;           // that of head 1 is -inf
  float dropout_p = 0;

  // Of the kernel that is judged; fp16 accumulation knows none of the options from `bias` on but
  // sinks.
  Accumulate accumulate = Accumulate::kFloat32;
  // q and k are rounded to int8, and the answer is that of what they are then.
  Quantize quantize = Quantize::kNone;
};

// Each for a reason; ragged against tiles of 64 unless the name says otherwise.
std::vector<Case> cases(int head_dim);

// A handful that reaches every line of a kernel, for slow builds.
std::vector<Case> few_cases(int head_dim);

// The options from `bias` on, each by itself and together.
std::vector<Case> option_cases(int head_dim);

// A handful of these, for slow builds.
std::vector<Case> few_option_cases(int head_dim);
std::vector<Case> few_alibi_cases(int head_dim);  // of several tiles of keys
std::vector<Case> few_dropout_cases(int head_dim);
std::vector<Case> few_bias_cases(
    int head_dim);  // of 16 bits, with entries of two keys side by side
std::vector<Case> few_mask_cases(int head_dim);  // tiles of which all, some, or no keys are seen
std::vector<Case> few_bias_mask_cases(int head_dim);

// Few queries with many keys, which kernels for decoding split; the first reach every line of one.
std::vector<Case> decode_cases(int head_dim);

// Head dimensions that only kernels without a fixed one take.
std::vector<Case> odd_head_dims();

class SolvedCase {
 public:
  SolvedCase(Case const& what, DType dtype);

  // The call; its outputs are this object's, overwritten with garbage now.
  Problem call();

  // With fp16 accumulation the unfused computation rounds its own sums to fp16 after every 8
  // products, those of P V within 32 keys (python/cutlass_attn/testing.py has the derivation); LSE
  // may be off by the bound of those roundings.
  //
  // With q and k in int8, the unfused computation has exponents by one multiply-add of a number as
  // large as 1.5 * 2^23, where nothing but softmax follows (sm80/quantized_queries.hpp): they, and
  // LSE, are off by up to a unit of the integer products.
  //
  // With P and V in 8 bits (int8, fp8), it rounds them as core/quantize.hpp says, and LSE may be
  // off by two weights that are rounded the other way, in e4m3, whose steps depend on when the row
  // max was updated, by half a step of each.
  //
  // Empty if the outputs are right: within 1.5 times the RMS error (twice with Q K^T in fp16) and
  // twice the largest error of an unfused computation that rounds P and O to the dtype, NaN exactly
  // where fp64 has it, nothing written beside them. Otherwise what is wrong, and where.
  std::string verdict() const;

  // All bytes of O and LSE, to compare runs.
  std::vector<char> outputs() const;

 private:
  // A 4-d operand of the case: storage in the dtype and how to find an element.
  struct Operand {
    std::vector<char> bytes;
    int rows, columns;
    int64_t first;  // element in memory
    int64_t batch_stride, head_stride, row_stride;

    int64_t index(int b, int h, int r, int d) const {
      return first + b * batch_stride + h * head_stride + r * row_stride + d;
    }
  };

  // A bias, a mask or slopes: numbers or bytes of a 4-d array, of which some strides may be 0.
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
    std::vector<double> shift;       // what was subtracted from K: (batch, KV head, column)
    std::vector<double> of_queries;  // (batch, head, query)
    std::vector<double> of_keys;     // (batch, KV head, tile of 64 keys, group)
  };
  Int8Scales round_to_int8(std::vector<double>& q, std::vector<double>& k) const;
  void round_weights(std::vector<double> const& p, std::vector<double> const& v, int b, int h_kv,
                     double sum, double* row) const;
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
  uint64_t rng_state_[2] = {0x123456789abcdef0u, 0x0fedcba987654321u};
  std::vector<float> lse_;
  std::vector<double> exact_o_, unfused_o_, exact_lse_;  // (B, Hq, Sq[, Dv])
  std::vector<double> lse_bound_;                        // what fp16 accumulation may move LSE by
};

}  // namespace attention_case
