// Options of a call that a kernel may lack: which ones a call asks for. A new one is named in
// facts.toml, which makes its bit, and has its condition here.
#pragma once

#include <string>
#include <vector>

#include "core/problem.hpp"
#include "core/score.hpp"

namespace cutlass_attn {

// What the call asks for.
inline uint32_t options_of(Problem const& p) {
  uint32_t bits = 0;
  if (p.logits.softcap != 0.0f) bits |= option::softcap;
  if (!(p.logits.softmax_scale >= IdentityScore::kLeastScale)) bits |= option::negative_scale;
  if (p.logits.alibi_slopes) bits |= option::alibi_slopes;
  if (p.logits.bias) bits |= option::bias;
  if (p.mask.elements) bits |= option::mask;
  if (p.mask.attention_chunk != 0) bits |= option::attention_chunk;
  if (p.logits.sinks) bits |= option::sinks;
  if (p.dropout.p != 0.0f) bits |= option::dropout;
  for (Sequences const* s : {&p.seq_q, &p.seq_k}) {
    if (s->cu_seqlens || s->seqused) bits |= option::varlen;
  }
  if (p.kv.block_table) bits |= option::paged_kv;
  if (p.q.scale || p.k.scale || p.v.scale || p.o.scale) bits |= option::scales;
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

// As Python has them.
inline char const* name_of(DType dtype) { return facts::kDTypeNames[int(dtype)]; }
inline char const* name_of(Accumulate accumulate) {
  return facts::kAccumulateNames[int(accumulate)];
}

// Bytes of an element.
inline int size_of(DType dtype) { return facts::kDTypeBytes[int(dtype)]; }

}  // namespace cutlass_attn
