// The part of block_body.hpp that does not depend on the instruction set.
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

// A block's rows in an operand with one entry per logit.
struct Entries {
  int64_t offset[kMaxBlock];  // of key 0, in elements
  bool is_same;               // all rows share their entries

  template <class Rows>
  Entries(PerLogit const& t, Rows const& rows, int row, int width) : is_same(true) {
    for (int r = 0; r < width; ++r) {
      offset[r] = rows.seq.batch * t.batch_stride + rows.head[row + r] * t.head_stride +
                  rows.query[row + r] * t.row_stride;
      is_same &= offset[r] == offset[0];
    }
  }
};

// How a bias, and a mask of bytes, change a logit.
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

// A Problem has the scale in float32. If a float64 call passes the default, rounded to float32, the
// exact default is used.
template <class Real>
Real softmax_scale_of(Problem const& p) {
  if constexpr (std::is_same_v<Real, double>) {
    double const usual = 1.0 / std::sqrt(double(p.head_dim));
    if (p.logits.softmax_scale == float(usual)) return usual;
  }
  return Real(p.logits.softmax_scale);
}

// exp(x)
inline float exp_of(float x) { return fast_exp2(x * kLog2e); }
inline double exp_of(double x) { return std::exp(x); }

}  // namespace cutlass_attn::cpu
