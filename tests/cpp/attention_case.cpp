#include "attention_case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "core/dropout.hpp"
#include "formats.hpp"

namespace attention_case {
namespace {

constexpr char kGarbage = 0x5a;

// Four sums, which do not wait for each other.
double exact_dot(double const* x, double const* y, int n) {
  double sums[4] = {};
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int j = 0; j < 4; ++j) sums[j] += x[i + j] * y[i + j];
  }
  for (; i < n; ++i) sums[0] += x[i] * y[i];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

}  // namespace

// --- Operands ------------------------------------------------------------------------------------

SolvedCase::Operand SolvedCase::make(char name, int heads, int rows, int columns,
                                     double fill) const {
  int const odd = std::strchr(case_.unaligned, name) != nullptr;
  Operand x{{}, rows, columns, odd, 0, 0, 0};
  bool const padded = case_.layout == Layout::kPadded;
  int64_t const pitch = columns + (padded ? 8 : 0) + odd, length = rows + (padded ? 3 : 0);
  if (case_.layout == Layout::kTransposed) {
    x.head_stride = pitch;
    x.row_stride = heads * pitch;
  } else {
    x.row_stride = pitch;
    x.head_stride = length * pitch;
  }
  x.batch_stride = heads * length * pitch;
  // Kernels copy 16 bytes at a time: the allocator's memory is aligned to 16 bytes.
  int64_t const size = x.first + case_.batch * x.batch_stride;
  x.bytes.resize(size_t(size) * format(dtype_).bytes);
  for (int64_t i = 0; i < size; ++i) store(x, i, fill);
  return x;
}

void SolvedCase::store(Operand& x, int64_t index, double value) const {
  Format const f = format(dtype_);
  uint32_t const bits = encode(f, value);
  std::memcpy(&x.bytes[index * f.bytes], &bits, f.bytes);
}

double SolvedCase::load(Operand const& x, int64_t index) const {
  Format const f = format(dtype_);
  uint32_t bits = 0;
  std::memcpy(&bits, &x.bytes[index * f.bytes], f.bytes);
  return decode(f, bits);
}

std::vector<double> SolvedCase::values(Operand const& x) const {
  std::vector<double> all(x.bytes.size() / format(dtype_).bytes);
  for (size_t i = 0; i < all.size(); ++i) all[i] = load(x, int64_t(i));
  return all;
}

void SolvedCase::randomize(Operand& x, double magnitude, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, magnitude);
  int const heads = &x == &q_ ? case_.num_heads_q : case_.num_heads_kv;
  bool const is_e4m3 = case_.fp8_kv && &x != &q_;
  for (int b = 0; b < case_.batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int r = 0; r < x.rows; ++r) {
        for (int d = 0; d < x.columns; ++d) {
          double const value = normal(random);
          store(x, x.index(b, h, r, d), is_e4m3 ? round_to_e4m3(value) : value);
        }
      }
    }
  }
}

cutlass_attn::Operand SolvedCase::ref(Operand& x) const {
  return {x.bytes.data() + x.first * format(dtype_).bytes, x.batch_stride, x.head_stride,
          x.row_stride};
}

SolvedCase::Entries SolvedCase::make_entries(char const* dims) const {
  std::string const varying(dims);
  int const sizes[4] = {case_.batch, case_.num_heads_q, case_.seqlen_q, case_.seqlen_k};
  // From the innermost dimension outwards. In a transposed layout queries are outside heads.
  int const order[4] = {3, 2, 1, 0}, transposed[4] = {2, 1, 3, 0};
  Entries x;
  int64_t size = 1;
  for (int d : case_.layout == Layout::kTransposed ? transposed : order) {
    if (varying.find("bhqk"[d]) == std::string::npos) continue;
    x.strides[d] = size;
    size *= sizes[d];
    if (case_.layout == Layout::kPadded) size += 3;
  }
  x.values.resize(size_t(size), kNaN);
  return x;
}

// Fills bias, mask, slopes and sinks, if the case has them.
void SolvedCase::make_terms() {
  Case const& c = case_;
  std::mt19937 random(4);
  std::normal_distribution<double> normal(0, 1);
  auto const fill = [&](Entries& x, auto const& value) {
    for (int b = 0; b < c.batch; ++b) {
      for (int h = 0; h < c.num_heads_q; ++h) {
        for (int q = 0; q < c.seqlen_q; ++q) {
          for (int k = 0; k < c.seqlen_k; ++k) {
            x.values[b * x.strides[0] + h * x.strides[1] + q * x.strides[2] + k * x.strides[3]] =
                value(b, q, k);
          }
        }
      }
    }
  };
  auto const store_all = [](Entries& x, Format f) {
    x.bytes.resize(x.values.size() * f.bytes);
    for (size_t i = 0; i < x.values.size(); ++i) {
      uint32_t const bits = encode(f, x.values[i]);
      std::memcpy(&x.bytes[i * f.bytes], &bits, f.bytes);
      x.values[i] = decode(f, bits);
    }
  };
  if (c.bias) {
    bias_ = make_entries(c.bias);
    fill(bias_, [&](int, int, int) { return 2 * normal(random); });
    store_all(bias_, format(c.bias_is_fp32 ? DType::kFloat32 : dtype_));
  }
  if (c.mask) {
    mask_ = make_entries(c.mask);
    bool const has_queries = mask_.strides[2] != 0;
    fill(mask_, [&](int b, int q, int k) {
      if (c.mask_block > 0) return (b + q / c.mask_block + k / c.mask_block) % 3 != 0 ? 1 : 0;
      if (has_queries && q % 5 == 2) return 0;
      return std::array{0, 1, 2, 0, 16, 255}[random() % 6];  // any nonzero byte is visible
    });
    for (double value : mask_.values)
      mask_.bytes.push_back(char(uint8_t(std::isnan(value) ? 1 : value)));
  }
  if (c.alibi) {
    slopes_ = make_entries(c.alibi);
    fill(slopes_, [&](int, int, int) { return std::fabs(0.1 * normal(random)); });
    store_all(slopes_, format(DType::kFloat32));
  }
  for (int h = 0; h < (c.sinks ? c.num_heads_q : 0); ++h) {
    sinks_.push_back(h == 1 ? -float(kInfinity) : float(1 + 2 * normal(random)));
  }
}

SolvedCase::SolvedCase(Case const& what, DType dtype) : case_(what), dtype_(dtype) {
  if (case_.head_dim_v == 0) case_.head_dim_v = case_.head_dim;
  if (case_.softmax_scale == 0) case_.softmax_scale = float(1 / std::sqrt(case_.head_dim));
  Case const& c = case_;
  q_ = make('q', c.num_heads_q, c.seqlen_q, c.head_dim, kNaN);
  k_ = make('k', c.num_heads_kv, c.seqlen_k, c.head_dim, kNaN);
  v_ = make('v', c.num_heads_kv, c.seqlen_k, c.head_dim_v, kNaN);
  o_ = make('o', c.num_heads_q, c.seqlen_q, c.head_dim_v, 0);
  randomize(q_, c.magnitude, c.seed);
  randomize(k_, 1, c.seed + 1);
  randomize(v_, 1, c.seed + 2);
  if (c.nan_key >= 0) {
    for (int d = 0; d < c.head_dim; ++d) store(k_, k_.index(0, 0, c.nan_key, d), kNaN);
  }
  for (int b = 0; c.latent_kv && b < c.batch; ++b) {
    for (int h = 0; h < c.num_heads_kv; ++h) {
      for (int r = 0; r < c.seqlen_k; ++r) {
        for (int d = 0; d < c.head_dim_v; ++d) {
          store(v_, v_.index(b, h, r, d), load(k_, k_.index(b, h, r, d)));
        }
      }
    }
  }
  make_terms();
  lse_.resize(size_t(c.batch) * c.num_heads_q * c.seqlen_q);
  if (c.max_logits) max_logits_.resize(lse_.size());
  solve();
}

Problem SolvedCase::call() {
  std::fill(o_.bytes.begin(), o_.bytes.end(), kGarbage);
  std::memset(lse_.data(), kGarbage, lse_.size() * sizeof(float));
  std::memset(max_logits_.data(), kGarbage, max_logits_.size() * sizeof(float));
  Case const& c = case_;
  Problem p;
  p.q = ref(q_);
  p.k = ref(k_);
  p.v = ref(c.latent_kv ? k_ : v_);
  p.o = ref(o_);
  p.softmax_lse = lse_.data();
  if (c.max_logits) p.max_logits = max_logits_.data();
  p.set_dtype(dtype_);
  p.batch = c.batch;
  p.num_heads_q = c.num_heads_q;
  p.num_heads_kv = c.num_heads_kv;
  p.seq_q.seqlen = c.seqlen_q;
  p.seq_k.seqlen = c.seqlen_k;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.logits.softmax_scale = c.softmax_scale;
  p.logits.softcap = c.softcap;
  p.mask.window_left = c.window_left;
  p.mask.window_right = c.window_right;
  p.mask.causal = c.causal;
  p.mask.diagonal_shift = c.diagonal_shift;
  p.mask.attention_chunk = c.attention_chunk;
  if (c.bias) p.logits.bias = bias_.ref();
  p.logits.bias_dtype = c.bias_is_fp32 ? DType::kFloat32 : dtype_;
  if (c.mask) p.mask.elements = mask_.ref();
  if (c.alibi) {
    p.logits.alibi_slopes = reinterpret_cast<float const*>(slopes_.bytes.data());
    p.logits.alibi_batch_stride = slopes_.strides[0];
  }
  if (c.sinks) p.logits.sinks = sinks_.data();
  p.accumulate = c.accumulate;
  p.quantize = c.quantize;
  p.dropout.p = c.dropout_p;
  if (c.dropout_p > 0) p.dropout.rng_state = rng_state_;
  p.dropout.is_part = c.seqlen_k > 64;
  return p;
}

// --- The answer ----------------------------------------------------------------------------------

bool SolvedCase::visible(int b, int h, int q, int k) const {
  Case const& c = case_;
  int64_t const at = int64_t(q) + c.seqlen_k - c.seqlen_q + c.diagonal_shift;
  if (c.causal && k > at) return false;
  if (!c.causal && c.window_right != kUnbounded && k > at + c.window_right) return false;
  if (c.window_left != kUnbounded && k < at - c.window_left) return false;
  auto const chunk = [&](int64_t key) { return std::floor(double(key) / c.attention_chunk); };
  if (c.attention_chunk > 0 && chunk(k) != chunk(at)) return false;
  return !c.mask || mask_.at(b, h, q, k) != 0;
}

// The logit of a visible key.
double SolvedCase::logit(int b, int h, int q, int k, double dot) const {
  Case const& c = case_;
  double x = double(c.softmax_scale) * dot;
  if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
  if (c.alibi) {
    int64_t const distance = int64_t(q) + c.seqlen_k - c.seqlen_q + c.diagonal_shift - k;
    x -= slopes_.at(b, h, q, k) * std::fabs(double(distance));
  }
  if (c.bias) x += bias_.at(b, h, q, k);
  return x;
}

// q.k with the sum rounded to fp16 after every 8 products, if the case accumulates in fp16.
// `bound`: limit of the effect of these roundings.
double SolvedCase::rounded_dot(double const* q, double const* k, double& bound) const {
  bool const rounds =
      case_.accumulate == Accumulate::kFloat16 || case_.accumulate == Accumulate::kFloat16Qk;
  Format const f = format(DType::kFloat16);
  double sum = 0;
  bound = 0;
  for (int d = 0; d < case_.head_dim; ++d) {
    sum += q[d] * k[d];
    if (!rounds || (d % 8 != 7 && d + 1 != case_.head_dim)) continue;
    sum = round_to(f, sum);
    bound += std::isfinite(sum) ? ulp(f, sum) / 2 : 0;
  }
  return sum;
}

// A row of O from logits with rounded sums. Sums of P V are rounded as well, if the case says so.
// Weights are relative to the largest weight, as in kernels.
void SolvedCase::round_sums(std::vector<double> const& logits, std::vector<double> const& v, int b,
                            int h_kv, double sink, double* row) const {
  Case const& c = case_;
  Format const f = format(DType::kFloat16);
  bool const rounds = c.accumulate != Accumulate::kFloat16Qk;
  double largest = sink, sum = 0;
  for (double x : logits) largest = std::fmax(largest, x);
  std::vector<double> weights;
  for (double x : logits) {
    weights.push_back(x == -kInfinity ? 0 : std::exp(x - largest));
    sum += weights.back();
  }
  if (sink != -kInfinity) sum += std::exp(sink - largest);
  for (int d = 0; d < c.head_dim_v; ++d) {
    double block_sum = 0;
    for (int j = 0; j < c.seqlen_k; ++j) {
      if (weights[j] != 0) {
        block_sum += round_to(f, weights[j]) * v[v_.index(b, h_kv, j, d)];
      }
      if (rounds && j % 8 == 7) block_sum = round_to(f, block_sum);
      if (j % 32 != 31 && j + 1 != c.seqlen_k) continue;
      row[d] += block_sum;
      block_sum = 0;
    }
    row[d] = sum == 0 ? 0 : row[d] / sum;
  }
}

void SolvedCase::solve() {
  Case const& c = case_;
  bool const is_fp32 = c.accumulate == Accumulate::kFloat32;
  Format const f = format(dtype_);
  cutlass_attn::DropoutMask const dropout(call());
  // Dropout drops in steps of 2^-15 of probability.
  double const dropped = std::round(double(c.dropout_p) * 32768) / 32768;
  std::vector<double> const v = values(v_), given_q = values(q_);
  std::vector<double> q = given_q, k = values(k_);
  bool const is_int8 = c.quantize != Quantize::kNone,
             is_8_bit_v = is_int8 && c.quantize != Quantize::kQk;
  // Without a softcap or other terms, a score goes from the sum to the exponent in one step.
  bool const is_one_step = is_int8 && c.softcap == 0 && !c.bias && !c.alibi && !c.mask &&
                           c.attention_chunk == 0 && c.softmax_scale > 0;
  Int8Scales scales;
  if (is_int8) scales = round_to_int8(q, k);
  bool const is_fp8 = is_8_bit_v && c.quantize != Quantize::kInt8;
  std::vector<double> const rounded_v = is_fp8 ? round_values_fp8(v) : v;
  std::vector<double> logits(c.seqlen_k), rounded_logits(c.seqlen_k), p(c.seqlen_k);
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.num_heads_q; ++h) {
      int const h_kv = h * c.num_heads_kv / c.num_heads_q;
      for (int i = 0; i < c.seqlen_q; ++i) {
        double const sink = c.sinks ? double(sinks_[h]) : -kInfinity;
        double largest = sink, largest_logit = -kInfinity, sum = 0, lse_bound = 0, q_shift = 0;
        for (int d = 0; is_int8 && d < c.head_dim; ++d) {
          q_shift += given_q[q_.index(b, h, i, d)] *
                     scales.shift[size_t(b * c.num_heads_kv + h_kv) * c.head_dim + d];
        }
        // One unit of the integer sums for key j.
        auto const unit = [&](int j) {
          int const tiles = (c.seqlen_k + 63) / 64;
          size_t const group = size_t((b * c.num_heads_kv + h_kv) * tiles + j / 64) * 4 + j % 8 / 2;
          size_t const query = size_t(b * c.num_heads_q + h) * c.seqlen_q + i;
          return std::fabs(double(c.softmax_scale)) * scales.of_queries[query] *
                 scales.of_keys[group];
        };
        for (int j = 0; j < c.seqlen_k; ++j) {
          logits[j] = rounded_logits[j] = -kInfinity;
          if (!visible(b, h, i, j)) continue;
          double const dot = q_shift + exact_dot(&q[q_.index(b, h, i, 0)],
                                                 &k[k_.index(b, h_kv, j, 0)], c.head_dim);
          if (is_one_step) lse_bound = std::fmax(lse_bound, unit(j));
          logits[j] = logit(b, h, i, j, dot);
          largest = std::fmax(largest, logits[j]);
          largest_logit = std::fmax(largest_logit, logits[j]);
          if (is_fp32) continue;
          double bound = 0;
          double const rounded =
              rounded_dot(&q[q_.index(b, h, i, 0)], &k[k_.index(b, h_kv, j, 0)], bound);
          rounded_logits[j] = logit(b, h, i, j, rounded);
          lse_bound = std::fmax(lse_bound, double(c.softmax_scale) * bound);
        }
        lse_bound_.push_back(lse_bound);
        for (int j = 0; j < c.seqlen_k; ++j) {
          p[j] = visible(b, h, i, j) ? std::exp(logits[j] - largest) : 0;
          sum += p[j];
        }
        if (sink != -kInfinity) sum += std::exp(sink - largest);
        size_t const row = exact_o_.size();
        exact_o_.resize(row + c.head_dim_v);
        unfused_o_.resize(row + c.head_dim_v);
        if (is_8_bit_v) {
          auto const round = is_fp8 ? &SolvedCase::round_weights_fp8 : &SolvedCase::round_weights;
          (this->*round)(p, rounded_v, b, h_kv, sum, &unfused_o_[row]);
          lse_bound_.back() += 0x1p-9;  // weights are summed in fp16, a few at a time
        }
        exact_max_.push_back(largest_logit);
        exact_lse_.push_back(sum == 0 ? -kInfinity : largest + std::log(sum));
        for (int j = 0; j < c.seqlen_k; ++j) {
          if (!visible(b, h, i, j)) continue;
          double exact = p[j] / sum;
          if (c.dropout_p > 0) exact *= dropout.factor(b, h, i, j) > 0 ? 1 / (1 - dropped) : 0;
          double rounded = exact;
          if (is_one_step) {  // exponents in units of log2
            double const magic = 1.5 * (1 << 23) * unit(j) + largest, log2e = 1 / std::log(2.0);
            rounded *= std::exp2(magic * log2e - float(magic * log2e));
          }
          rounded = round_to(f, rounded);
          for (int d = 0; d < c.head_dim_v; ++d) {
            exact_o_[row + d] += exact * v[v_.index(b, h_kv, j, d)];
            if (is_fp32 && !is_8_bit_v) unfused_o_[row + d] += rounded * v[v_.index(b, h_kv, j, d)];
          }
        }
        if (!is_fp32) round_sums(rounded_logits, v, b, h_kv, sink, &unfused_o_[row]);
        for (int d = 0; d < c.head_dim_v; ++d) {
          unfused_o_[row + d] = round_to(f, unfused_o_[row + d]);
        }
      }
    }
  }
}

std::string SolvedCase::verdict() const {
  Case const& c = case_;
  Format const f = format(dtype_);
  Operand outside = o_;  // garbage where the output is: nothing else may differ from garbage
  double worst = -1, largest_reference = 0, square = 0, square_reference = 0;
  std::string where;
  size_t n = 0, row = 0;

  auto const place = [&](int b, int h, int i) {
    return " at batch " + std::to_string(b) + ", head " + std::to_string(h) + ", query " +
           std::to_string(i);
  };
  auto const text = [](double got, double exact) {
    return ": " + std::to_string(got) + ", exactly " + std::to_string(exact);
  };
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.num_heads_q; ++h) {
      for (int i = 0; i < c.seqlen_q; ++i, ++row) {
        double const lse = lse_[row], exact_lse = exact_lse_[row];
        bool const same =
            std::isfinite(exact_lse)
                ? std::fabs(lse - exact_lse) <= 2e-6 * (8 + std::fabs(exact_lse)) + lse_bound_[row]
            : std::isnan(exact_lse) ? std::isnan(lse)
                                    : lse == exact_lse;
        if (!same) return "LSE" + place(b, h, i) + text(lse, exact_lse);
        if (c.max_logits) {
          double const got = max_logits_[row], exact = exact_max_[row];
          double const allowed = 2e-6 * (8 + std::fabs(exact));
          if (got != exact && !(std::fabs(got - exact) <= allowed)) {
            return "largest logit" + place(b, h, i) + text(got, exact);
          }
        }
        for (int d = 0; d < c.head_dim_v; ++d, ++n) {
          int64_t const at = o_.index(b, h, i, d);
          std::memset(&outside.bytes[at * f.bytes], kGarbage, f.bytes);
          double const got = load(o_, at), exact = exact_o_[n];
          auto const here = [&] {
            return place(b, h, i) + ", column " + std::to_string(d) + text(got, exact);
          };
          if (std::isnan(got) != std::isnan(exact)) return "O" + here();
          if (std::isnan(exact)) continue;
          double const error = std::fabs(got - exact), reference = std::fabs(unfused_o_[n] - exact);
          square += error * error;
          square_reference += reference * reference;
          largest_reference = std::fmax(largest_reference, reference);
          if (error - ulp(f, exact) > worst) {
            worst = error - ulp(f, exact);
            where = here();
          }
        }
      }
    }
  }
  for (char byte : outside.bytes) {
    if (byte != kGarbage) return "memory beside O was written";
  }
  // Rounding to fp32 says nothing about fp32 accumulation, which has an error of its own. Dropout
  // scales that error as it scales O.
  double const fp32 = dtype_ == DType::kFloat32 ? 4e-6 * c.magnitude / (1 - c.dropout_p) : 0;
  if (worst > 2 * largest_reference + fp32) {
    return "O" + where + "; an unfused kernel is off by " + std::to_string(largest_reference);
  }
  // See cutlass_attn.testing: with sums of Q K^T in fp16, the error is in a few rows.
  bool const is_qk_in_fp16 =
      c.accumulate == Accumulate::kFloat16 || c.accumulate == Accumulate::kFloat16Qk;
  double const allowed = (is_qk_in_fp16 ? 2.0 : 1.5) * std::sqrt(square_reference);
  if (std::sqrt(square) > allowed + std::sqrt(double(n)) * fp32) {
    return "RMS error of O is " + std::to_string(std::sqrt(square / n)) +
           ", of an unfused kernel " + std::to_string(std::sqrt(square_reference / n));
  }
  return "";
}

std::vector<char> SolvedCase::outputs() const {
  std::vector<char> all = o_.bytes;
  for (std::vector<float> const* x : {&lse_, &max_logits_}) {
    char const* const bytes = reinterpret_cast<char const*>(x->data());
    all.insert(all.end(), bytes, bytes + x->size() * sizeof(float));
  }
  return all;
}

}  // namespace attention_case
