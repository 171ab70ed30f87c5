// The wmma kernel on problems whose answer is known, and the checks that the earlier effort
// proposed to find out why its kernel was wrong. The tests run them, and so does measure_wmma.cpp
// with planted bugs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "scalar/minimal.hpp"
#include "simt/host_unit.hpp"
#include "wmma/forward.hpp"

namespace wmma_checks {

using namespace cutlass_attn;
using cutlass::half_t;

using LaunchKernel = Status (*)(Problem const&, RunOptions const&);
template <int kWarps, int kFragM, int kFragN>
constexpr LaunchKernel kWmma =
    &simt::launch_on_host<wmma::Forward<half_t, 64, 16 * kWarps, 64, kWarps, kFragM, kFragN>,
                          IdentityScore>;
constexpr LaunchKernel kScalar = &simt::launch_on_host<scalar::Minimal<half_t>, IdentityScore>;

constexpr int kHeadDim = 64;
using Values = std::function<float(int batch_and_head, int row, int column)>;

// One call: Q, K and V by their elements, contiguous; S = Sq = Sk.
struct KnownProblem {
  int batch, heads, seqlen;
  float scale;
  bool causal;
  std::vector<half_t> q, k, v;

  KnownProblem(int batch, int heads, int seqlen, float scale, bool causal, Values const& of_q,
               Values const& of_k, Values const& of_v)
      : batch(batch), heads(heads), seqlen(seqlen), scale(scale), causal(causal) {
    std::pair<std::vector<half_t>*, Values const*> const operands[] = {
        {&q, &of_q}, {&k, &of_k}, {&v, &of_v}};
    for (auto const& [x, value] : operands) {
      for (int bh = 0; bh < batch * heads; ++bh) {
        for (int i = 0; i < seqlen * kHeadDim; ++i) {
          x->push_back(half_t((*value)(bh, i / kHeadDim, i % kHeadDim)));
        }
      }
    }
  }

  // O, or nothing if the engine reported an error of the kernel.
  std::vector<half_t> run(LaunchKernel launch, int num_threads = 0) {
    std::vector<half_t> o(q.size(), half_t(0.0f));
    Problem p;
    p.batch = batch;
    p.num_heads_q = p.num_heads_kv = heads;
    p.seq_q.seqlen = p.seq_k.seqlen = seqlen;
    p.head_dim = p.head_dim_v = kHeadDim;
    p.logits.softmax_scale = scale;
    p.mask.causal = causal;
    auto const ref = [&](std::vector<half_t>& x) {
      int64_t const head = int64_t(seqlen) * kHeadDim;
      return Operand{x.data(), heads * head, head, kHeadDim};
    };
    p.q = ref(q), p.k = ref(k), p.v = ref(v), p.o = ref(o);
    RunOptions options;
    options.num_threads = num_threads;
    Status const status = launch(p, options);
    if (status.ok()) return o;
    std::fprintf(stderr, "%s\n", status.message.c_str());
    return {};
  }

  // In fp64, rounded to fp16.
  std::vector<half_t> exact() const {
    std::vector<half_t> o;
    std::vector<double> const wide_q(q.begin(), q.end()), wide_v(v.begin(), v.end());
    std::vector<double> transposed(k.size());  // per head
    for (size_t i = 0; i < k.size(); ++i) {
      size_t const head = i / (seqlen * kHeadDim), row = i / kHeadDim % seqlen, d = i % kHeadDim;
      transposed[(head * kHeadDim + d) * seqlen + row] = double(k[i]);
    }
    for (size_t row = 0; row < q.size() / kHeadDim; ++row) {
      size_t const head = row / seqlen * seqlen * kHeadDim;
      int const keys = causal ? int(row % seqlen) + 1 : seqlen;
      std::vector<double> weight(keys), sums(kHeadDim);
      for (int d = 0; d < kHeadDim; ++d) {
        double const x = wide_q[row * kHeadDim + d] * scale;
        for (int j = 0; j < keys; ++j) weight[j] += x * transposed[head + d * seqlen + j];
      }
      double const largest = *std::max_element(weight.begin(), weight.end());
      double sum = 0;
      for (int j = 0; j < keys; ++j) {
        double const w = std::exp(weight[j] - largest);
        sum += w;
        for (int d = 0; d < kHeadDim; ++d) sums[d] += w * wide_v[head + j * kHeadDim + d];
      }
      for (int d = 0; d < kHeadDim; ++d) o.push_back(half_t(float(sums[d] / sum)));
    }
    return o;
  }
};

inline Values normal(unsigned seed) {
  return [random = std::mt19937(seed), draw = std::normal_distribution<float>()](
             int, int, int) mutable { return draw(random); };
}

inline bool near(std::vector<half_t> const& x, std::function<double(size_t)> const& expected,
                 size_t count) {
  if (x.empty()) return false;
  for (size_t i = 0; i < count; ++i) {
    if (!(std::fabs(float(x[i]) - expected(i)) < 1e-3)) return false;
  }
  return true;
}

inline Values identity() {
  return [](int, int row, int column) { return float(row == column); };
}

// Q = K = V = I and scale 1: S is I, O is softmax(I).
inline bool identity_gives_identity() {
  double const e = std::exp(1.0);
  KnownProblem problem(1, 1, 64, 1.0f, false, identity(), identity(), identity());
  return near(
      problem.run(kWmma<4, 16, 16>),
      [=](size_t i) { return (i / 64 == i % 64 ? e : 1.0) / (e + 63); }, 64 * 64);
}

// V = I, so that O is P: its first 16 x 16 against the scalar kernel.
inline bool first_tile_is_the_scalar_one(LaunchKernel launch, int rows) {
  KnownProblem problem(1, 1, 64, 0.125f, false, normal(1), normal(2), identity());
  std::vector<half_t> const scalar = problem.run(kScalar), o = problem.run(launch);
  if (o.empty()) return false;
  for (int i = 0; i < rows * 16; ++i) {
    int const at = i / 16 * 64 + i % 16;
    if (!(std::fabs(float(o[at]) - float(scalar[at])) < 1e-3)) return false;
  }
  return true;
}

// Each query matches one key; all matches differ, and none is in the query's own row. O is V
// permuted.
inline bool known_values_come_back() {
  auto const place = [](int row) { return (row * 5 + 3) % 64; };
  KnownProblem problem(
      1, 1, 64, 30.0f, false, [&](int, int row, int d) { return float(d == place(row)); },
      [](int, int row, int d) { return float(d == row * 3 % 64); },
      [](int, int row, int d) { return float(row * 16 + d % 16) / 256.0f; });
  std::vector<half_t> const o = problem.run(kWmma<4, 16, 16>);
  return near(
      o,
      [&](size_t i) {
        int const row = int(i / 64), d = int(i % 64);
        int key = 0;
        while (key * 3 % 64 != place(row)) ++key;
        return (key * 16 + d % 16) / 256.0;
      },
      64 * 64);
}

}  // namespace wmma_checks
