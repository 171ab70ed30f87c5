#include "simt/attention_case.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace attention_case {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr char kGarbage = 0x5a;

// --- Number formats
// -------------------------------------------------------------------------------

struct Format {
  int bytes, significand_bits, exponent_bits;  // without the implicit bit

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};

Format format(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {2, 10, 5};
    case DType::kBFloat16:
      return {2, 7, 8};
    case DType::kFloat32:
      return {4, 23, 8};
  }
  return {};
}

// Distance of neighbouring numbers at x.
double ulp(Format f, double x) {
  int exponent = 1 - f.bias();
  if (x != 0) exponent = std::max(exponent, std::ilogb(x));
  return std::ldexp(1.0, exponent - f.significand_bits);
}

double round_to(Format f, double x) {
  return std::isfinite(x) ? std::nearbyint(x / ulp(f, x)) * ulp(f, x) : x;
}

uint32_t encode(Format f, double x) {
  uint32_t const sign = uint32_t(std::signbit(x)) << (f.significand_bits + f.exponent_bits);
  uint32_t const top = ((1u << f.exponent_bits) - 1) << f.significand_bits;
  if (std::isnan(x)) return sign | top | 1u << (f.significand_bits - 1);
  x = std::fabs(round_to(f, x));
  if (std::isinf(x)) return sign | top;
  // Counts in units of the last place; the carry out of the significand is the exponent.
  double const unit = ulp(f, x);
  uint32_t const exponent = uint32_t(std::ilogb(unit) + f.significand_bits - 1 + f.bias());
  return sign | ((exponent << f.significand_bits) + uint32_t(x / unit));
}

double decode(Format f, uint32_t bits) {
  uint32_t const fraction = bits & ((1u << f.significand_bits) - 1);
  int const exponent = int(bits >> f.significand_bits) & ((1 << f.exponent_bits) - 1);
  double x = std::ldexp(fraction, 1 - f.bias() - f.significand_bits);
  if (exponent == (1 << f.exponent_bits) - 1) {
    x = fraction ? kNaN : kInfinity;
  } else if (exponent > 0) {
    x = std::ldexp(fraction + std::ldexp(1.0, f.significand_bits),
                   exponent - f.bias() - f.significand_bits);
  }
  return bits >> (f.significand_bits + f.exponent_bits) & 1 ? -x : x;
}

}  // namespace

// --- Cases
// ----------------------------------------------------------------------------------------

std::vector<Case> few_cases(int head_dim) {
  Case causal{"causal, ragged, three tiles of keys, two heads", 100, 170};
  causal.num_heads_q = causal.num_heads_kv = 2;
  causal.causal = true;
  Case window{"window on both sides, GQA", 20, 140};
  window.num_heads_q = 4;
  window.num_heads_kv = 2;
  window.window_left = 70;
  window.window_right = 9;
  Case whole{"whole tiles", 64, 192};
  Case nothing{"rows that see nothing", 70, 20};
  nothing.causal = true;
  std::vector<Case> list{causal, window, whole, nothing};
  for (Case& x : list) x.head_dim = head_dim;
  return list;
}

std::vector<Case> cases(int head_dim) {
  std::vector<Case> list = few_cases(head_dim);
  auto const add = [&](char const* name, int seqlen_q, int seqlen_k) -> Case& {
    Case x{name, seqlen_q, seqlen_k};
    x.head_dim = head_dim;
    list.push_back(x);
    return list.back();
  };
  add("one query, one key", 1, 1);
  add("one query", 1, 150);
  add("one key", 70, 1);
  add("one key, causal", 70, 1).causal = true;
  add("no key", 70, 0);
  add("no key, causal", 3, 0).causal = true;
  add("ragged", 65, 127);
  add("causal, square", 128, 128).causal = true;
  add("causal, ragged", 129, 129).causal = true;
  add("causal, more keys", 40, 200).causal = true;
  add("causal, more queries", 200, 90).causal = true;
  {
    Case& x = add("causal, top-left aligned", 90, 200);
    x.causal = true;
    x.diagonal_shift = 90 - 200;
  }
  {
    Case& x = add("causal, diagonal beyond the keys", 70, 70);
    x.causal = true;
    x.diagonal_shift = int64_t(1) << 33;
  }
  {
    Case& x = add("causal, diagonal before the keys", 70, 70);
    x.causal = true;
    x.diagonal_shift = -(int64_t(1) << 33);
  }
  add("window to the left", 150, 150).window_left = 20;
  add("window to the right", 150, 150).window_right = 70;
  {
    Case& x = add("window of one key", 130, 130);
    x.window_left = x.window_right = 0;
  }
  {
    Case& x = add("causal window", 150, 200);
    x.causal = true;
    x.window_left = 64;
  }
  {
    Case& x = add("window beside all keys", 150, 30);
    x.window_left = x.window_right = 3;
  }
  {
    Case& x = add("batch, GQA", 70, 70);
    x.batch = 2;
    x.num_heads_q = 6;
    x.num_heads_kv = 2;
  }
  {
    Case& x = add("MQA, transposed layout", 70, 90);
    x.batch = 2;
    x.num_heads_q = 3;
    x.layout = Layout::kTransposed;
    x.causal = true;
  }
  {
    Case& x = add("contiguous layout", 70, 90);
    x.batch = 2;
    x.num_heads_q = x.num_heads_kv = 2;
    x.layout = Layout::kContiguous;
  }
  {
    Case& x = add("softcap", 70, 130);
    x.softcap = 5;
    x.magnitude = 8;
    x.causal = true;
  }
  {
    Case& x = add("negative scale", 30, 130);
    x.softmax_scale = -0.25f;
  }
  add("large magnitudes", 70, 130).magnitude = 100;
  {
    Case& x = add("NaN in a key reaches the rows that see it", 90, 90);
    x.causal = true;
    x.nan_key = 50;
  }
  return list;
}

std::vector<Case> odd_head_dims() {
  std::vector<Case> list;
  for (auto const& [head_dim, head_dim_v] : {std::pair{1, 1}, {40, 24}, {65, 130}, {256, 256}}) {
    Case x{"head_dim " + std::to_string(head_dim) + ", of V " + std::to_string(head_dim_v), 40,
           130};
    x.head_dim = head_dim;
    x.head_dim_v = head_dim_v;
    x.causal = true;
    list.push_back(x);
  }
  return list;
}

// --- Operands
// -------------------------------------------------------------------------------------

Problem::Operand Problem::make(int heads, int rows, int columns, double fill) const {
  Operand x{{}, rows, columns, 0, 0, 0};
  bool const padded = case_.layout == Layout::kPadded;
  int64_t const pitch = columns + (padded ? 8 : 0), length = rows + (padded ? 3 : 0);
  if (case_.layout == Layout::kTransposed) {
    x.head_stride = pitch;
    x.row_stride = heads * pitch;
  } else {
    x.row_stride = pitch;
    x.head_stride = length * pitch;
  }
  x.batch_stride = heads * length * pitch;
  // Kernels copy 16 bytes at a time: whatever the allocator gives is aligned to that.
  x.bytes.resize(size_t(case_.batch) * x.batch_stride * format(dtype_).bytes);
  for (int64_t i = 0; i < case_.batch * x.batch_stride; ++i) store(x, i, fill);
  return x;
}

void Problem::store(Operand& x, int64_t index, double value) const {
  Format const f = format(dtype_);
  uint32_t const bits = encode(f, value);
  std::memcpy(&x.bytes[index * f.bytes], &bits, f.bytes);
}

double Problem::load(Operand const& x, int64_t index) const {
  Format const f = format(dtype_);
  uint32_t bits = 0;
  std::memcpy(&bits, &x.bytes[index * f.bytes], f.bytes);
  return decode(f, bits);
}

std::vector<double> Problem::values(Operand const& x) const {
  std::vector<double> all(x.bytes.size() / format(dtype_).bytes);
  for (size_t i = 0; i < all.size(); ++i) all[i] = load(x, int64_t(i));
  return all;
}

void Problem::randomize(Operand& x, double magnitude, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, magnitude);
  int const heads = &x == &q_ ? case_.num_heads_q : case_.num_heads_kv;
  for (int b = 0; b < case_.batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int r = 0; r < x.rows; ++r) {
        for (int d = 0; d < x.columns; ++d) store(x, x.index(b, h, r, d), normal(random));
      }
    }
  }
}

cutlass_attn::TensorRef Problem::ref(Operand& x) const {
  return {x.bytes.data(), x.batch_stride, x.head_stride, x.row_stride};
}

Problem::Problem(Case const& what, DType dtype) : case_(what), dtype_(dtype) {
  if (case_.head_dim_v == 0) case_.head_dim_v = case_.head_dim;
  if (case_.softmax_scale == 0) case_.softmax_scale = float(1 / std::sqrt(case_.head_dim));
  Case const& c = case_;
  q_ = make(c.num_heads_q, c.seqlen_q, c.head_dim, kNaN);
  k_ = make(c.num_heads_kv, c.seqlen_k, c.head_dim, kNaN);
  v_ = make(c.num_heads_kv, c.seqlen_k, c.head_dim_v, kNaN);
  o_ = make(c.num_heads_q, c.seqlen_q, c.head_dim_v, 0);
  randomize(q_, c.magnitude, 1);
  randomize(k_, 1, 2);
  randomize(v_, 1, 3);
  if (c.nan_key >= 0) {
    for (int d = 0; d < c.head_dim; ++d) store(k_, k_.index(0, 0, c.nan_key, d), kNaN);
  }
  lse_.resize(size_t(c.batch) * c.num_heads_q * c.seqlen_q);
  solve();
}

AttnParams Problem::call() {
  std::fill(o_.bytes.begin(), o_.bytes.end(), kGarbage);
  std::memset(lse_.data(), kGarbage, lse_.size() * sizeof(float));
  Case const& c = case_;
  AttnParams p;
  p.q = ref(q_);
  p.k = ref(k_);
  p.v = ref(v_);
  p.o = ref(o_);
  p.softmax_lse = lse_.data();
  p.dtype = dtype_;
  p.batch = c.batch;
  p.num_heads_q = c.num_heads_q;
  p.num_heads_kv = c.num_heads_kv;
  p.seqlen_q = c.seqlen_q;
  p.seqlen_k = c.seqlen_k;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.softmax_scale = c.softmax_scale;
  p.softcap = c.softcap;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.causal = c.causal;
  p.diagonal_shift = c.diagonal_shift;
  return p;
}

// --- The answer
// -----------------------------------------------------------------------------------

void Problem::solve() {
  Case const& c = case_;
  Format const f = format(dtype_);
  auto const visible = [&](int i, int j) {
    int64_t const at = int64_t(i) + c.seqlen_k - c.seqlen_q + c.diagonal_shift;
    if (c.causal && j > at) return false;
    if (!c.causal && c.window_right != kUnbounded && j > at + c.window_right) return false;
    return c.window_left == kUnbounded || j >= at - c.window_left;
  };
  std::vector<double> const q = values(q_), k = values(k_), v = values(v_);
  std::vector<double> logit(c.seqlen_k), p(c.seqlen_k);
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < c.num_heads_q; ++h) {
      int const h_kv = h * c.num_heads_kv / c.num_heads_q;
      for (int i = 0; i < c.seqlen_q; ++i) {
        double largest = -kInfinity, sum = 0;
        for (int j = 0; j < c.seqlen_k; ++j) {
          logit[j] = -kInfinity;
          if (!visible(i, j)) continue;
          double dot = 0;
          for (int d = 0; d < c.head_dim; ++d) {
            dot += q[q_.index(b, h, i, d)] * k[k_.index(b, h_kv, j, d)];
          }
          logit[j] = double(c.softmax_scale) * dot;
          if (c.softcap > 0) logit[j] = c.softcap * std::tanh(logit[j] / c.softcap);
          largest = std::fmax(largest, logit[j]);
        }
        for (int j = 0; j < c.seqlen_k; ++j) {
          p[j] = visible(i, j) ? std::exp(logit[j] - largest) : 0;
          sum += p[j];
        }
        exact_lse_.push_back(sum == 0 ? -kInfinity : largest + std::log(sum));
        size_t const row = exact_o_.size();
        exact_o_.resize(row + c.head_dim_v);
        unfused_o_.resize(row + c.head_dim_v);
        for (int j = 0; j < c.seqlen_k; ++j) {
          if (!visible(i, j)) continue;
          double const exact = p[j] / sum, rounded = round_to(f, exact);
          for (int d = 0; d < c.head_dim_v; ++d) {
            exact_o_[row + d] += exact * v[v_.index(b, h_kv, j, d)];
            unfused_o_[row + d] += rounded * v[v_.index(b, h_kv, j, d)];
          }
        }
        for (int d = 0; d < c.head_dim_v; ++d) {
          unfused_o_[row + d] = round_to(f, unfused_o_[row + d]);
        }
      }
    }
  }
}

std::string Problem::verdict() const {
  Case const& c = case_;
  Format const f = format(dtype_);
  Operand outside = o_;  // gets garbage where the output is: nothing else may differ from garbage
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
        bool const same = std::isfinite(exact_lse)
                              ? std::fabs(lse - exact_lse) <= 2e-6 * (8 + std::fabs(exact_lse))
                          : std::isnan(exact_lse) ? std::isnan(lse)
                                                  : lse == exact_lse;
        if (!same) return "LSE" + place(b, h, i) + text(lse, exact_lse);
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
  // Rounding to fp32 says nothing about sums in fp32: there, an error of their own.
  double const fp32 = dtype_ == DType::kFloat32 ? 4e-6 * c.magnitude : 0;
  if (worst > 2 * largest_reference + fp32) {
    return "O" + where + "; an unfused kernel is off by " + std::to_string(largest_reference);
  }
  if (std::sqrt(square) > 1.5 * std::sqrt(square_reference) + std::sqrt(double(n)) * fp32) {
    return "RMS error of O is " + std::to_string(std::sqrt(square / n)) +
           ", of an unfused kernel " + std::to_string(std::sqrt(square_reference / n));
  }
  return "";
}

std::vector<char> Problem::outputs() const {
  std::vector<char> all = o_.bytes;
  char const* const lse = reinterpret_cast<char const*>(lse_.data());
  all.insert(all.end(), lse, lse + lse_.size() * sizeof(float));
  return all;
}

}  // namespace attention_case
