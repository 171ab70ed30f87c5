// The part of block_body.hpp that is common to all instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/dropout.hpp"
#include "core/math.hpp"
#include "core/sequences.hpp"
#include "cpu/element.hpp"

namespace cutlass_attn::cpu {

inline constexpr int kMaxLanes = 16;
inline constexpr int kMaxBlock = 48;

// Rows of K or V, as Real.
template <class Real>
struct Panel {
  Real const* data;
  int64_t stride;
};

// Rows of a block in an operand with one entry per logit.
struct Entries {
  int64_t offset[kMaxBlock];  // of key 0, in elements
  bool is_same;               // whether all rows share their entries

  template <class Rows>
  Entries(PerLogit const& t, Rows const& rows, int row, int width) : is_same(true) {
    for (int r = 0; r < width; ++r) {
      offset[r] = rows.seq.batch * t.batch_stride + rows.head[row + r] * t.head_stride +
                  rows.query[row + r] * t.row_stride;
      is_same &= offset[r] == offset[0];
    }
  }
};

// How a bias and a bool mask change a logit.
struct MaskByte {
  uint8_t is_visible;
};
template <class Real>
Real with_entry(Real logit, MaskByte mask) {
  return mask.is_visible ? logit : Real(-kInf);
}
template <class Real, class Bias>
Real with_entry(Real logit, Bias bias) {
  return logit + Real(to_float(bias));
}

inline float tanh_of(float x) { return fast_tanh(x); }
inline double tanh_of(double x) { return std::tanh(x); }

// Softmax scale and softcap as Real: exact in a float64 call.
template <class Real>
struct Scalars {
  Real softmax_scale, softcap;

  explicit Scalars(Problem const& p)
      : softmax_scale(p.logits.softmax_scale), softcap(p.logits.softcap) {
    if constexpr (std::is_same_v<Real, double>) {
      if (p.float64) softmax_scale = p.float64->softmax_scale, softcap = p.float64->softcap;
    }
  }
};

// The ALiBi slope of a head.
template <class Real>
Real alibi_slope_of(Problem const& p, int batch, int head) {
  int64_t const at = batch * p.logits.alibi_batch_stride + head;
  if constexpr (std::is_same_v<Real, double>) {
    if (p.logits.has_float64_slopes) {
      return reinterpret_cast<double const*>(p.logits.alibi_slopes)[at];
    }
  }
  return Real(p.logits.alibi_slopes[at]);
}

// exp(x)
inline float exp_of(float x) { return fast_exp2(x * kLog2e); }
inline double exp_of(double x) { return std::exp(x); }

}  // namespace cutlass_attn::cpu
