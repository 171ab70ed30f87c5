// A call of a backward kernel on the CPU, its gradients in fp64 computed from the definition, and
// the comparison of both.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "core/dropout.hpp"
#include "core/mask.hpp"
#include "core/score.hpp"
#include "simt/host_unit.hpp"
#include "simt/sanitized.hpp"

namespace backward_case {

using namespace cutlass_attn;

struct Case {
  std::string name;
  int batch = 1, heads_q = 2, heads_kv = 1, seqlen_q = 70, seqlen_k = 70, head_dim = 64;
  int head_dim_v = 0;  // 0: as head_dim
  Mask mask = {};
  float softcap = 0.0f, scale = 0.25f, dropout = 0.0f, magnitude = 1.0f;
  bool has_bias = false, has_mask = false, has_alibi = false, has_sinks = false;
  bool has_grad_lse = false;
  bool has_short_bias = false;  // in the operands' dtype
  // Dimensions over which the bias does not broadcast.
  std::array<bool, 4> bias_of = {false, true, true, true};
  std::array<bool, 4> mask_of = {false, true, true, true};    // likewise for the mask
  std::function<bool(int b, int h, int i, int j)> sees = {};  // the mask; null: a random mask
  int nan_keys = 0;  // number of last keys, which no query sees, that are NaN, as are their values
  std::vector<int32_t> cu_seqlens_q = {}, cu_seqlens_k = {};  // packed sequences, if not empty
};

// Most of the time of solving a case. Not the kernel's work, so ThreadSanitizer need not see it.
[[gnu::no_sanitize("thread")]] inline double dot(double const* x, double const* y, int count) {
  double sums[4] = {};
  for (int i = 0; i < count; ++i) sums[i % 4] += x[i] * y[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
[[gnu::no_sanitize("thread")]] inline void add(double factor, double const* x, double* y,
                                               int count) {
  for (int i = 0; i < count; ++i) y[i] += factor * x[i];
}

// A call, its gradients in fp64, and the gradients of a kernel.
template <class Element>
struct Solved {
  Case c;
  Problem p;
  Gradients grad;
  std::vector<Element> q, k, v, o, grad_o, grad_q, grad_k, grad_v;
  std::vector<Element> short_bias;
  std::vector<float> lse, grad_lse, bias, alibi, sinks, grad_sinks, grad_bias;
  std::vector<uint8_t> visible;
  std::vector<double> exact_q, exact_k, exact_v, exact_sinks, exact_bias;
  uint64_t rng_state[6] = {7, 11, 100, 30, 16 * 5, 32 * 7};

  Solved(Case const& what, bool has_grad_bias) : c(what), has_grad_bias(has_grad_bias) {
    if (c.head_dim_v == 0) c.head_dim_v = c.head_dim;
    bool const is_packed = !c.cu_seqlens_q.empty();
    rows_q = is_packed ? c.cu_seqlens_q.back() + 3 : c.batch * c.seqlen_q;
    rows_k = is_packed ? c.cu_seqlens_k.back() + 3 : c.batch * c.seqlen_k;
    std::mt19937 random(5);
    std::normal_distribution<float> draw;
    auto const fill = [&](auto& x, size_t count, float magnitude) {
      x.resize(count);
      for (auto& value : x) value = std::decay_t<decltype(value)>(draw(random) * magnitude);
    };
    fill(q, size_t(rows_q) * c.heads_q * c.head_dim, c.magnitude);
    fill(k, size_t(rows_k) * c.heads_kv * c.head_dim, c.magnitude);
    fill(v, size_t(rows_k) * c.heads_kv * c.head_dim_v, c.magnitude);
    fill(grad_o, size_t(rows_q) * c.heads_q * c.head_dim_v, 1.0f);
    o.resize(grad_o.size());
    lse.assign(size_t(rows_q) * c.heads_q, -kInf);
    fill(grad_lse, lse.size(), 1.0f);
    int const sizes[] = {c.batch, c.heads_q, c.seqlen_q, c.seqlen_k};
    auto const entries_of = [&](std::array<bool, 4> const& of, int64_t (&strides)[4],
                                int multiple = 1) {
      int64_t entries = 1;
      for (int d = 3; d >= 0; --d) {
        strides[d] = of[d] ? entries : 0;
        if (of[d]) entries *= d == 3 ? (sizes[d] + multiple - 1) / multiple * multiple : sizes[d];
      }
      return size_t(entries);
    };
    fill(bias, entries_of(c.bias_of, strides), 1.0f);
    if (c.has_short_bias) {  // in rows that TMA can read, with NaN at their ends
      short_bias.resize(entries_of(c.bias_of, short_strides, 8), Element(NAN));
      for (size_t i = 0; i < bias.size(); ++i) {
        size_t const row = i / size_t(c.seqlen_k), padded = size_t(c.seqlen_k + 7) / 8 * 8;
        Element& x = short_bias[c.bias_of[3] ? row * padded + i % size_t(c.seqlen_k) : i];
        x = Element(bias[i]);
        bias[i] = float(x);
      }
    }
    fill(alibi, size_t(c.heads_q), 0.1f);
    fill(sinks, size_t(c.heads_q), 1.0f);
    visible.resize(entries_of(c.mask_of, mask_strides));
    for (auto& x : visible) x = draw(random) > -1.0f;
    if (c.sees) {
      for (int64_t at = 0; at < int64_t(sizes[0]) * sizes[1] * sizes[2] * sizes[3]; ++at) {
        int const j = int(at % sizes[3]), i = int(at / sizes[3] % sizes[2]);
        int const h = int(at / sizes[3] / sizes[2] % sizes[1]),
                  b = int(at / sizes[3] / sizes[2] / sizes[1]);
        visible[mask_at(b, h, i, j)] = c.sees(b, h, i, j) ? 1 + j % 255 : 0;
      }
    }
    auto const poison = [](auto& x, size_t count) {
      x.resize(count);
      std::memset(static_cast<void*>(x.data()), 0xff, count * sizeof x[0]);
    };
    poison(grad_q, q.size());
    poison(grad_k, k.size());
    poison(grad_v, v.size());
    poison(grad_sinks, sinks.size());
    poison(grad_bias, bias.size());
    exact_q.resize(q.size());
    exact_k.resize(k.size());
    exact_v.resize(v.size());
    exact_sinks.resize(sinks.size());
    exact_bias.resize(bias.size());
    state();
    Inputs const inputs = {in_fp64(q), in_fp64(k), in_fp64(v), in_fp64(grad_o)};
    for (int b = 0; b < c.batch; ++b) {
      for (int h = 0; h < c.heads_q; ++h) solve(inputs, b, h);
    }
    for (int row = 0; row < rows_k; ++row) {
      if (row % c.seqlen_k < c.seqlen_k - c.nan_keys) continue;
      for (int i = 0; i < c.heads_kv * c.head_dim; ++i) {
        k[size_t(row) * c.heads_kv * c.head_dim + i] = Element(NAN);
      }
      for (int i = 0; i < c.heads_kv * c.head_dim_v; ++i) {
        v[size_t(row) * c.heads_kv * c.head_dim_v + i] = Element(NAN);
      }
    }
  }

  // Rows of all heads are adjacent: (row, head, column).
  Operand rows(std::vector<Element>& x, int heads, int seqlen, int dim) const {
    int64_t const row = int64_t(heads) * dim;
    DType const dtype =
        std::is_same_v<Element, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;
    return {x.data(), c.cu_seqlens_q.empty() ? seqlen * row : 0, dim, row, dtype};
  }

  void state() {
    p.batch = c.batch;
    p.num_heads_q = c.heads_q;
    p.num_heads_kv = c.heads_kv;
    p.head_dim = c.head_dim;
    p.head_dim_v = c.head_dim_v;
    p.seq_q.seqlen = c.seqlen_q;
    p.seq_k.seqlen = c.seqlen_k;
    if (!c.cu_seqlens_q.empty()) {
      p.seq_q.cu_seqlens = c.cu_seqlens_q.data();
      p.seq_k.cu_seqlens = c.cu_seqlens_k.data();
      p.seq_q.total = rows_q;
      p.seq_k.total = rows_k;
    }
    p.q = rows(q, c.heads_q, c.seqlen_q, c.head_dim);
    p.k = rows(k, c.heads_kv, c.seqlen_k, c.head_dim);
    p.v = rows(v, c.heads_kv, c.seqlen_k, c.head_dim_v);
    p.o = rows(o, c.heads_q, c.seqlen_q, c.head_dim_v);
    p.softmax_lse = lse.data();
    p.logits.softmax_scale = c.scale;
    p.logits.softcap = c.softcap;
    p.mask = c.mask;
    if (c.has_bias) p.logits.bias = per_logit(bias, strides);
    p.logits.bias_dtype = DType::kFloat32;
    if (c.has_short_bias) {
      p.logits.bias = per_logit(short_bias, short_strides), p.logits.bias_dtype = p.q.dtype;
    }
    if (c.has_mask) {
      p.mask.elements = {visible.data(), mask_strides[0], mask_strides[1], mask_strides[2],
                         mask_strides[3]};
    }
    if (c.has_alibi) p.logits.alibi_slopes = alibi.data();
    if (c.has_sinks) p.logits.sinks = sinks.data();
    p.dropout = {c.dropout, rng_state, c.seqlen_k > 64};
    grad.o = rows(grad_o, c.heads_q, c.seqlen_q, c.head_dim_v);
    grad.q = rows(grad_q, c.heads_q, c.seqlen_q, c.head_dim);
    grad.k = rows(grad_k, c.heads_kv, c.seqlen_k, c.head_dim);
    grad.v = rows(grad_v, c.heads_kv, c.seqlen_k, c.head_dim_v);
    if (c.has_grad_lse) grad.softmax_lse = grad_lse.data();
    if (c.has_sinks) grad.sinks = grad_sinks.data();
    if (has_grad_bias) grad.bias = per_logit(grad_bias, strides);
    p.grad = &grad;
  }

  template <class T>
  PerLogit per_logit(std::vector<T> const& x, int64_t const (&of)[4]) const {
    return {x.data(), of[0], of[1], of[2], of[3]};
  }

  struct Inputs {
    std::vector<double> q, k, v, grad_o;
  };
  static std::vector<double> in_fp64(std::vector<Element> const& x) {
    std::vector<double> y(x.size());
    std::transform(x.begin(), x.end(), y.begin(), [](Element e) { return double(float(e)); });
    return y;
  }

  // Forward call and gradients of one head. The gradient of a row's scores is that of softmax, dS =
  // P (dP - sum of P dP) + dLSE P, with the output rounded as a forward call returns it.
  void solve(Inputs const& in, int b, int h) {
    bool const is_packed = !c.cu_seqlens_q.empty();
    int const first_q = is_packed ? c.cu_seqlens_q[b] : b * c.seqlen_q;
    int const first_k = is_packed ? c.cu_seqlens_k[b] : b * c.seqlen_k;
    int const queries = is_packed ? c.cu_seqlens_q[b + 1] - first_q : c.seqlen_q;
    int const keys = is_packed ? c.cu_seqlens_k[b + 1] - first_k : c.seqlen_k;
    int const kv = h / (c.heads_q / c.heads_kv), dim = c.head_dim, dim_v = c.head_dim_v;
    IntervalMask const interval(c.mask, {queries, keys});
    DropoutMask const dropout(p);
    auto const bias_at = [&](int i, int j) {
      return b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3];
    };
    auto const at = [](int row, int heads, int head, int d) {
      return (int64_t(row) * heads + head) * d;
    };
    for (int i = 0; i < queries; ++i) {
      int64_t const q_at = at(first_q + i, c.heads_q, h, dim);
      int64_t const o_at = at(first_q + i, c.heads_q, h, dim_v);
      std::vector<double> logit(keys, -INFINITY), slope(keys, 1.0), weight(keys), factor(keys, 1.0);
      double most = c.has_sinks ? sinks[h] : -INFINITY;
      for (int j = 0; j < keys; ++j) {
        if (!interval.visible(i, j) || (c.has_mask && !visible[mask_at(b, h, i, j)])) continue;
        double s = dot(&in.q[q_at], &in.k[at(first_k + j, c.heads_kv, kv, dim)], dim);
        s *= c.scale;
        if (c.softcap > 0.0f) {
          double const t = std::tanh(s / c.softcap);
          s = c.softcap * t;
          slope[j] = 1.0 - t * t;
        }
        if (c.has_alibi) s -= alibi[h] * std::fabs(double(j) - i - (keys - queries));
        if (c.has_bias) s += bias[bias_at(i, j)];
        logit[j] = s;
        most = std::max(most, s);
      }
      int64_t const row = is_packed ? int64_t(h) * rows_q + first_q + i
                                    : (int64_t(b) * c.heads_q + h) * c.seqlen_q + i;
      double sum = c.has_sinks ? std::exp(sinks[h] - most) : 0.0;
      for (int j = 0; j < keys; ++j) {
        if (logit[j] > -INFINITY) sum += std::exp(logit[j] - most);
      }
      double const norm = sum > 0.0 ? most + std::log(sum) : -INFINITY;
      lse[row] = float(norm);
      std::vector<double> out(dim_v);
      for (int j = 0; j < keys; ++j) {
        if (c.dropout > 0.0f) factor[j] = dropout.factor(b, h, i, j);
        weight[j] = logit[j] > -INFINITY ? std::exp(logit[j] - norm) : 0.0;
        add(weight[j] * factor[j], &in.v[at(first_k + j, c.heads_kv, kv, dim_v)], &out[0], dim_v);
      }
      double delta = 0.0;
      for (int d = 0; d < dim_v; ++d) {
        o[o_at + d] = Element(float(out[d]));
        delta += out[d] * in.grad_o[o_at + d];
      }
      if (c.has_grad_lse) delta -= grad_lse[row];
      if (c.has_sinks && sum > 0.0) exact_sinks[h] -= std::exp(sinks[h] - norm) * delta;
      for (int j = 0; j < keys; ++j) {
        if (weight[j] == 0.0) continue;
        int64_t const k_at = at(first_k + j, c.heads_kv, kv, dim);
        int64_t const v_at = at(first_k + j, c.heads_kv, kv, dim_v);
        double const dp = dot(&in.grad_o[o_at], &in.v[v_at], dim_v);
        add(weight[j] * factor[j], &in.grad_o[o_at], &exact_v[v_at], dim_v);
        double const grad_logit = weight[j] * (dp * factor[j] - delta);
        exact_bias[bias_at(i, j)] += grad_logit;
        double const ds = grad_logit * slope[j] * c.scale;
        add(ds, &in.k[k_at], &exact_q[q_at], dim);
        add(ds, &in.q[q_at], &exact_k[k_at], dim);
      }
    }
  }

  // Empty, or which gradient is off and by how much.
  std::string verdict() const {
    double const tolerance = std::is_same_v<Element, cutlass::half_t> ? 2e-3 : 1.2e-2;
    std::string text;
    auto const judge = [&](char const* name, auto const& got, std::vector<double> const& exact,
                           double limit) {
      double error = 0.0, size = 0.0;
      for (size_t i = 0; i < exact.size(); ++i) {
        double const x = double(float(got[i]));
        if (exact[i] == 0.0 && untouched(name, i)) continue;
        error += (x - exact[i]) * (x - exact[i]);
        size += exact[i] * exact[i];
        if (std::isnan(x)) error = NAN;
      }
      double const relative = std::sqrt(error / (size > 0.0 ? size : 1.0));
      if (!(relative <= limit)) text += std::string(" ") + name + " " + std::to_string(relative);
    };
    judge("grad_q", grad_q, exact_q, tolerance);
    judge("grad_k", grad_k, exact_k, tolerance);
    judge("grad_v", grad_v, exact_v, tolerance);
    if (c.has_sinks) judge("grad_sinks", grad_sinks, exact_sinks, tolerance);
    // The sums over a row's keys cancel almost completely.
    if (has_grad_bias)
      judge("grad_bias", grad_bias, exact_bias, c.bias_of[3] ? tolerance : 2 * tolerance);
    return text;
  }

 private:
  bool has_grad_bias;
  int rows_q = 0, rows_k = 0;
  // Of the bias in fp32, of the bias in the operands' dtype, of the mask.
  int64_t strides[4] = {}, short_strides[4] = {}, mask_strides[4] = {};

  size_t mask_at(int b, int h, int i, int j) const {
    return size_t(b * mask_strides[0] + h * mask_strides[1] + i * mask_strides[2] +
                  j * mask_strides[3]);
  }

  // Packed rows of no sequence are not written.
  bool untouched(char const* name, size_t i) const {
    if (c.cu_seqlens_q.empty()) return false;
    for (char const* whole : {"grad_sinks", "grad_bias"}) {
      if (std::strcmp(name, whole) == 0) return false;
    }
    bool const is_q = std::strcmp(name, "grad_q") == 0;
    int const dim = std::strcmp(name, "grad_v") == 0 ? c.head_dim_v : c.head_dim;
    size_t const row = size_t(is_q ? c.heads_q : c.heads_kv) * dim;
    return i / row >= size_t(is_q ? c.cu_seqlens_q.back() : c.cu_seqlens_k.back());
  }
};

template <class Kernel>
constexpr bool has_bias_grad(...) {
  return Kernel::Config::kHasBiasGrad;
}
template <class Kernel, class OfBias = typename Kernel::OfBias>
constexpr bool has_bias_grad(int) {
  return std::is_same_v<typename Kernel::Params, typename OfBias::Params>;
}

// Persistent blocks: in the last run one takes all tiles, or two do, if the run is crowded.
// crowded: further runs with so many concurrent blocks that blocks overtake each other.
template <class Kernel, class... Scores>
void run(Case const& what, simt::FiberOrder other = simt::FiberOrder::kReverse, int crowded = 0) {
  Solved<typename Kernel::Config::Element> solved(what, has_bias_grad<Kernel>(0));
  solved.grad.deterministic = Kernel::Config::kIsOrdered;
  std::vector<char> first;
  int64_t const bytes = Kernel::Params::workspace_bytes(solved.p, {}, facts_of<Kernel>());
  std::vector<simt::Schedule> schedules(2);
  schedules[0].order = simt::FiberOrder::kForward, schedules[1].order = other;
  for (int i = 0; i < crowded; ++i)
    schedules.push_back({6, simt::FiberOrder::kRandom, uint64_t(i)});
  static int call = 0;
  ++call;
  for (size_t i = 0; i < schedules.size(); ++i) {
    if (is_left_out(int(i), call)) continue;
    std::vector<char> workspace(size_t(bytes) + 256, char(0xff));
    simt::launch_schedule() = schedules[i];
    RunOptions options;
    auto const address = reinterpret_cast<uintptr_t>(workspace.data());
    options.workspace = {workspace.data() + (256 - address % 256), bytes};
    DeviceLimits device;
    bool const is_last = i + 1 == schedules.size();
    if (facts_of<Kernel>().is_persistent && is_last) device.num_sms = crowded ? 2 : 1;
    Status const status =
        simt::launch_with_pre_post_on_host<Kernel, Scores...>(solved.p, options, device);
    std::string error = status.ok() ? solved.verdict() : status.message;
    if (Kernel::Config::kIsOrdered) {
      // The workspace: dQ in fp32 shows a difference in order that rounding to 16 bits would hide.
      auto const* const begin = static_cast<char const*>(options.workspace.data);
      std::vector<char> const given(begin, begin + bytes);
      if (first.empty()) first = given;
      if (given != first) error += " grad_q depends on the order of blocks";
    }
    if (!error.empty()) check::fail(__FILE__, __LINE__, what.name + ": " + error);
  }
}

inline Mask causal() {
  Mask mask;
  mask.causal = true;
  return mask;
}
inline Mask window(int left, int right) {
  Mask mask;
  mask.window_left = left;
  mask.window_right = right;
  return mask;
}

}  // namespace backward_case
