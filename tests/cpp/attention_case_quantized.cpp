// Operands and weights of a case in 8 bits, as defined in core/quantize.hpp, in doubles and plain
// loops.
#include <algorithm>
#include <cmath>

#include "attention_case.hpp"
#include "formats.hpp"

namespace attention_case {

namespace {

// int8 numbers that share a scale.
struct Int8Group {
  float amax = 0;
  bool is_finite = true;

  void add(double x) {
    is_finite = is_finite && std::isfinite(x);
    amax = std::fmax(amax, float(std::fabs(x)));
  }
  double scale() const {
    if (!is_finite) return kNaN;
    return amax < 0x1p-100f ? 0 : amax * (1.0f / 127);
  }
  double rounded(double x) const {
    return scale() == 0 ? 0 : std::nearbyint(x * double(127 / amax)) * scale();
  }
};

}  // namespace

// As in kernels/core/quantize.hpp, for both operands in place.
SolvedCase::Int8Scales SolvedCase::round_to_int8(std::vector<double>& q,
                                                 std::vector<double>& k) const {
  Case const& c = case_;
  Int8Scales scales;
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.num_heads_kv; ++h) {
      int const samples = std::min(64, c.seqlen_k);
      for (int d = 0; d < c.head_dim; ++d) {
        float sums[8] = {};
        for (int i = 0; i < samples; ++i) {
          float const x = float(k[k_.index(b, h, int(int64_t(i) * c.seqlen_k / samples), d)]);
          if (std::isfinite(x)) sums[i % 8] += x;
        }
        float total = sums[0];
        for (int i = 1; i < 8; ++i) total += sums[i];
        float const mean = total * (1.0f / float(samples));
        float const shift = std::isfinite(mean) ? mean : 0;
        scales.shift.push_back(shift);
        for (int j = 0; j < c.seqlen_k; ++j) {
          double& x = k[k_.index(b, h, j, d)];
          x = float(x) - shift;
        }
      }
      std::vector<Int8Group> groups((c.seqlen_k + 63) / 64 * 4);
      auto const each = [&](auto const& visit) {
        for (int j = 0; j < c.seqlen_k; ++j) {
          Int8Group& group = groups[j / 64 * 4 + j % 8 / 2];
          for (int d = 0; d < c.head_dim; ++d) visit(group, k[k_.index(b, h, j, d)]);
        }
      };
      each([](Int8Group& group, double& x) { group.add(x); });
      each([](Int8Group& group, double& x) { x = group.rounded(x); });
      for (Int8Group const& group : groups) scales.of_keys.push_back(group.scale());
    }
    for (int h = 0; h < c.num_heads_q; ++h) {
      for (int i = 0; i < c.seqlen_q; ++i) {
        Int8Group row;
        for (int d = 0; d < c.head_dim; ++d) row.add(q[q_.index(b, h, i, d)]);
        for (int d = 0; d < c.head_dim; ++d) {
          double& x = q[q_.index(b, h, i, d)];
          x = row.rounded(x);
        }
        scales.of_queries.push_back(row.scale());
      }
    }
  }
  return scales;
}

// Computes O of a row with P and V in int8 into `row`, from weights that add up to `sum`.
void SolvedCase::round_weights(std::vector<double> const& p, std::vector<double> const& v, int b,
                               int h_kv, double sum, double* row) const {
  Case const& c = case_;
  auto const value = [&](int j, int d) { return v[v_.index(b, h_kv, j, d)]; };
  for (int first = 0; first < c.seqlen_k; first += 64) {
    int const keys = std::min(64, c.seqlen_k - first);
    double amax[64] = {}, eighths[64], of_tile = 0, largest = 0;
    for (int n = 0; n < keys; ++n) {
      for (int d = 0; d < c.head_dim_v; ++d) {
        amax[n] = std::fmax(amax[n], std::fabs(value(first + n, d)));
      }
      of_tile = std::fmax(of_tile, amax[n]);
    }
    for (int n = 0; n < keys; ++n) {
      double const ratio = of_tile > 0 ? of_tile / std::fmax(amax[n], of_tile / 32) : 1;
      eighths[n] = std::fmin(std::floor(8 * ratio * (1 + 1e-7)), 255);
      largest = std::fmax(largest, p[first + n] * 8 / eighths[n]);
    }
    if (largest == 0) continue;
    for (int n = 0; n < keys; ++n) {
      double const unfolded = eighths[n] / 8, integer = p[first + n] / unfolded / largest * 255;
      double const weight = std::nearbyint(integer) * largest / 255 * unfolded;
      double const step = of_tile / 127 / unfolded;
      for (int d = 0; d < c.head_dim_v; ++d) {
        row[d] += step > 0 ? weight * std::nearbyint(value(first + n, d) / step) * step : 0;
      }
    }
  }
  for (int d = 0; d < c.head_dim_v && sum > 0; ++d) row[d] /= sum;
}

// V in e4m3, with a scale for each 64 keys.
std::vector<double> SolvedCase::round_values_fp8(std::vector<double> const& v) const {
  Case const& c = case_;
  std::vector<double> rounded(v.size());
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.num_heads_kv; ++h) {
      for (int first = 0; first < c.seqlen_k; first += 64) {
        double of_tile = 0;
        auto const each = [&](auto const& visit) {
          for (int j = first; j < std::min(first + 64, c.seqlen_k); ++j) {
            for (int d = 0; d < c.head_dim_v; ++d) visit(size_t(v_.index(b, h, j, d)));
          }
        };
        each([&](size_t at) { of_tile = std::fmax(of_tile, std::fabs(v[at])); });
        if (of_tile == 0) continue;
        double const scale = power_of_2(exponent_of(of_tile) - 6);
        each([&](size_t at) { rounded[at] = round_to_e4m3(v[at] / scale) * scale; });
      }
    }
  }
  return rounded;
}

// round_weights() in e4m3, relative to the sum of a tile's weights. `v` is that of
// round_values_fp8().
void SolvedCase::round_weights_fp8(std::vector<double> const& p, std::vector<double> const& v,
                                   int b, int h_kv, double sum, double* row) const {
  Case const& c = case_;
  for (int first = 0; first < c.seqlen_k; first += 64) {
    int const end = std::min(first + 64, c.seqlen_k);
    double of_weights = 0;
    for (int j = first; j < end; ++j) of_weights += p[j];
    if (of_weights == 0) continue;
    double const unit = of_weights / 448;
    for (int j = first; j < end; ++j) {
      double const weight = round_to_e4m3(p[j] / unit) * unit;
      for (int d = 0; d < c.head_dim_v; ++d) row[d] += weight * v[v_.index(b, h_kv, j, d)];
    }
  }
  for (int d = 0; d < c.head_dim_v && sum > 0; ++d) row[d] /= sum;
}

}  // namespace attention_case
