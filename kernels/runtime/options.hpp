// Options of a call that a kernel may lack, as bits: which ones a call asks for, and their names.
//
// A new one: a bit, its condition and its name here, and its name in generate.py.
#pragma once

#include <string>
#include <vector>

#include "core/params.hpp"
#include "core/score.hpp"

namespace cutlass_attn {

namespace option {
enum Bit : uint32_t {
  softcap = 1u << 0,
  negative_scale = 1u << 1,  // or zero, or next to it: what the identity score does not take
  alibi_slopes = 1u << 2,
  bias = 1u << 3,
  mask = 1u << 4,
  sinks = 1u << 5,
  dropout = 1u << 6,
};
}  // namespace option

// What the call asks for.
inline uint32_t options_of(AttnParams const& p) {
  uint32_t bits = 0;
  if (p.softcap != 0.0f) bits |= option::softcap;
  if (!(p.softmax_scale >= IdentityScore::kLeastScale)) bits |= option::negative_scale;
  if (p.alibi_slopes) bits |= option::alibi_slopes;
  if (p.bias) bits |= option::bias;
  if (p.mask) bits |= option::mask;
  if (p.sinks) bits |= option::sinks;
  if (p.dropout_p != 0.0f) bits |= option::dropout;
  return bits;
}

inline std::vector<std::string> option_names(uint32_t bits) {
  static constexpr char const* kNames[] = {"softcap", "negative_scale", "alibi_slopes", "bias",
                                           "mask",    "sinks",          "dropout"};
  std::vector<std::string> names;
  for (char const* name : kNames) {
    if (bits & 1u) names.push_back(name);
    bits >>= 1;
  }
  return names;
}

// As Python has it.
inline char const* name_of(Accumulate accumulate) {
  switch (accumulate) {
    case Accumulate::kFloat32:
      return "fp32";
    case Accumulate::kFloat16Qk:
      return "fp16_qk";
    case Accumulate::kFloat16Pv:
      return "fp16_pv";
    case Accumulate::kFloat16:
      return "fp16";
  }
  return "?";
}

}  // namespace cutlass_attn
