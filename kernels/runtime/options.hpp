// Options that a kernel may lack, and which of them a call uses. A new option is named in
// facts.toml, which makes its bit, and has its condition here.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "core/score.hpp"
#include "core/token_format.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn {

// Whether K and V are stored in fp8, in which no kernel computes.
inline bool has_fp8_kv(Problem const& p) {
  return p.k.dtype == DType::kFloat8E4M3 && p.v.dtype == DType::kFloat8E4M3;
}

// Whether K and V are tokens in one 8-bit format.
inline bool has_tokens(Problem const& p) {
  return is_token_format(p.k.dtype) && p.v.dtype == p.k.dtype;
}

// Whether V is a view of the first columns of K. No kernel uses that for smaller head dims.
inline bool has_latent_kv(Problem const& p) {
  Operand const &k = p.k, &v = p.v;
  return p.head_dim > 256 && p.head_dim_v <= p.head_dim && k.data == v.data && k.dtype == v.dtype &&
         k.batch_stride == v.batch_stride && k.row_stride == v.row_stride &&
         (p.num_heads_kv == 1 || k.head_stride == v.head_stride);
}

// Options of the call, as bits.
inline uint32_t options_of(Problem const& p, Op op) {
  uint32_t bits = 0;
  if (p.logits.softcap != 0.0f) bits |= option::softcap;
  if (!(p.logits.softmax_scale >= IdentityScore::kMinScale)) bits |= option::negative_scale;
  if (p.logits.alibi_slopes) bits |= option::alibi_slopes;
  if (p.logits.bias) bits |= option::bias;
  if (p.mask.elements) bits |= option::mask;
  if (p.mask.attention_chunk != 0) bits |= option::attention_chunk;
  if (p.logits.has_score_mod) bits |= option::score_mod;
  if (p.max_logits) bits |= option::return_max_logit;
  if (p.logits.sinks) bits |= option::sinks;
  if (p.dropout.p != 0.0f) bits |= option::dropout;
  for (Sequences const* s : {&p.seq_q, &p.seq_k}) {
    if (s->cu_seqlens || s->seqused || s->leftpad) bits |= option::varlen;
  }
  if (p.kv.block_table) bits |= option::paged_kv;
  if (p.q.scale || p.o.scale) bits |= option::scales;
  if (p.k.scale || p.v.scale) bits |= option::kv_scales;
  if (has_fp8_kv(p)) bits |= option::fp8_kv;
  if (p.k.dtype == DType::kDsMla) bits |= option::ds_mla;
  if (p.k.dtype == DType::kDsMlaV4) bits |= option::ds_mla_v4;
  if (op == Op::kForward && has_latent_kv(p)) bits |= option::latent_kv;
  if (p.kv.indices) bits |= option::indices;
  if (p.max_error != 0.0f) bits |= option::max_error;
  if (p.is_prequantized) bits |= option::prequantized;
  if (op == Op::kBackward && p.grad->bias) bits |= option::bias_grad;
  if (op == Op::kBackward && p.grad->deterministic) bits |= option::deterministic;
  return bits;
}

inline std::vector<std::string> option_names(uint32_t bits) {
  std::vector<std::string> names;
  for (char const* name : facts::kOptionNames) {
    if (bits & 1u) names.push_back(name);
    bits >>= 1;
  }
  return names;
}

// Names as in Python.
inline char const* name_of(DType dtype) { return facts::kDTypeNames[int(dtype)]; }
inline char const* name_of(Accumulate accumulate) {
  return facts::kAccumulateNames[int(accumulate)];
}
inline char const* name_of(Quantize quantize) { return facts::kQuantizeNames[int(quantize)]; }
// A value as Python writes it.
inline std::string value_of(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}
inline std::string value_of(Quantize quantize) {
  if (quantize == Quantize::kNone) return "None";
  return std::string("\"") + name_of(quantize) + "\"";
}

// Bytes of an element.
inline int size_of(DType dtype) { return facts::kDTypeBytes[int(dtype)]; }

}  // namespace cutlass_attn
