// A call of a backward kernel with a user's score_mod: gradients of the tensors that it captures,
// against sums of the gradients of logits in fp64.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "score_mod_case.hpp"

namespace captures {

using namespace score_mod_case;

inline constexpr int kMiddle = 20, kDistances = 90;

// A captured tensor, the sums of its gradients by a kernel, and in fp64.
template <int kRank>
struct Tensor {
  std::vector<float> values, sums;
  std::vector<double> exact, magnitude;  // magnitude: of the sums' terms
  int32_t size[kRank];

  Tensor(int32_t const (&shape)[kRank], float value) {
    size_t count = 1;
    for (int d = 0; d < kRank; ++d) count *= size_t(size[d] = shape[d]);
    values.assign(count, value), sums.assign(count, 0.0f);
    exact.assign(count, 0.0), magnitude.assign(count, 0.0);
  }
  void add_exact(size_t i, double x) { exact[i] += x, magnitude[i] += std::fabs(x); }
  auto read() const { return captured(values.data(), size); }
  auto add() const { return captured(sums.data(), size); }
};

// A logit, and the gradient of it.
struct Logit {
  int b, h, q, k;
  double score, grad;
};

// A call, and the tensors of all functions. Their values leave the logits as they are.
template <class Element>
struct Call : Solved<Element> {
  using Base = Solved<Element>;
  Tensor<1> slopes, rows;
  Tensor<2> columns, distances;
  Tensor<4> entries;

  explicit Call(Case const& what)
      : Base(what, false),
        slopes({what.heads_q}, 0.0f),
        rows({what.seqlen_q}, 0.0f),
        columns({what.batch, what.seqlen_k}, 0.0f),
        distances({what.heads_q, kDistances}, 0.0f),
        entries({what.batch, what.heads_q, what.seqlen_q, what.seqlen_k}, 0.0f) {
    this->p.logits.has_score_mod = true;
    this->p.logits.bias = {};
    if (what.has_bias) entries.values = this->bias;
  }

  // Calls visit(logit) for all visible logits.
  template <class Visit>
  void for_logits(Visit&& visit) const {
    Case const& c = this->c;
    size_t at = 0;
    for (int b = 0; b < c.batch; ++b) {
      for (int h = 0; h < c.heads_q; ++h) {
        for (int q = 0; q < c.seqlen_q; ++q) {
          for (int k = 0; k < c.seqlen_k; ++k) {
            double const grad = this->exact_bias[at++];
            if (grad == 0.0) continue;
            size_t const dim = size_t(c.head_dim);
            size_t const row = size_t(b * c.seqlen_q + q) * c.heads_q + h;
            size_t const key =
                size_t(b * c.seqlen_k + k) * c.heads_kv + h / (c.heads_q / c.heads_kv);
            double sum = 0.0;
            for (size_t d = 0; d < dim; ++d) {
              sum += double(float(this->q[row * dim + d])) * double(float(this->k[key * dim + d]));
            }
            visit(Logit{b, h, q, k, sum * c.scale, grad});
          }
        }
      }
    }
  }
  static size_t distance(Logit const& x) {  // index in a row of distances
    int at = x.q - x.k + kMiddle;
    at = at < 0 ? at + kDistances : at;
    return size_t(x.h * kDistances + (at < 0 ? 0 : at < kDistances ? at : kDistances - 1));
  }

  template <int kRank>
  void judge(char const* name, Tensor<kRank> const& x, std::string& text) const {
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < x.sums.size(); ++i) {
      error += (x.sums[i] - x.exact[i]) * (x.sums[i] - x.exact[i]);
      size += x.magnitude[i] * x.magnitude[i];
    }
    double const relative = std::sqrt(error / (size > 0.0 ? size : 1.0));
    double const limit = std::is_same_v<Element, half_t> ? 1e-3 : 8e-3;
    if (!(relative <= limit)) text += std::string(" ") + name + " " + std::to_string(relative);
  }
};

// For each function of score_mods.inc: its struct, and what it adds to the exact gradients.
template <class Call>
mods::Added make(Call& call, mods::Added*) {
  return {call.entries.read(), call.slopes.read(), call.rows.read(),
          call.columns.read(), call.entries.add(), call.slopes.add(),
          call.rows.add(),     call.columns.add(), {2.0f}};
}
template <class Call>
void add(Call& call, Logit const& x, mods::Added*) {
  Case const& c = call.c;
  call.entries.add_exact(size_t(((x.b * c.heads_q + x.h) * c.seqlen_q + x.q) * c.seqlen_k + x.k),
                         x.grad);
  call.slopes.add_exact(size_t(x.h), x.grad * (x.k - x.q));
  call.rows.add_exact(size_t(x.q), x.grad * 2);
  call.columns.add_exact(size_t(x.b * c.seqlen_k + x.k), x.grad);
}

template <class Call>
mods::Distance make(Call& call, mods::Distance*) {
  return {call.distances.read(), call.distances.add(), {kMiddle}};
}
template <class Call>
void add(Call& call, Logit const& x, mods::Distance*) {
  call.distances.add_exact(Call::distance(x), x.grad);
}

template <class Call>
mods::SteepAdded make(Call& call, mods::SteepAdded*) {
  return {call.slopes.read(), call.slopes.add(), {kOffset}};
}
template <class Call>
void add(Call& call, Logit const& x, mods::SteepAdded*) {
  call.slopes.add_exact(size_t(x.h), x.grad);
}

template <class Call>
mods::Scaled make(Call& call, mods::Scaled*) {
  for (float& x : call.slopes.values) x = 2.0f;
  for (float& x : call.rows.values) x = 0.5f;
  return {call.slopes.read(), call.rows.read(), call.distances.read(),
          call.slopes.add(),  call.rows.add(),  call.distances.add(),
          {kMiddle}};
}
template <class Call>
void add(Call& call, Logit const& x, mods::Scaled*) {
  call.slopes.add_exact(size_t(x.h), x.grad * x.score * 0.5);
  call.rows.add_exact(size_t(x.q), x.grad * x.score * 2.0);
  call.distances.add_exact(Call::distance(x), x.grad);
}

template <class Kernel, class Mod, class... Terms>
void check_kernel(Case what) {
  using Element = typename Kernel::Config::Element;
  what.head_dim = Kernel::Config::kHeadDim;
  what.bias_of = {true, true, true, true};
  what.has_bias = std::is_same_v<Mod, mods::Added>;
  what.has_mask = sizeof...(Terms) > 0;
  Call<Element> call(what);
  Mod* const which = nullptr;
  call.for_logits([&](Logit const& x) { add(call, x, which); });
  Mod const mod = make(call, which);
  Memory memory(Kernel::Params::workspace_bytes(call.p, {}, facts_of<Kernel>()), mod);
  using Mine = ScoreOf<Kernel, Mod, Terms...>;
  Status const status = simt::launch_with_pre_post_on_host<Kernel, Mine>(call.p, memory.options);
  // With NaN keys in a tile that has other keys, only these gradients are numbers.
  std::string error = !status.ok() ? status.message : what.nan_keys > 0 ? "" : call.verdict();
  if (status.ok()) {
    call.judge("slopes", call.slopes, error);
    call.judge("rows", call.rows, error);
    call.judge("columns", call.columns, error);
    call.judge("distances", call.distances, error);
    call.judge("entries", call.entries, error);
  }
  if (!error.empty()) check::fail(__FILE__, __LINE__, what.name + ": " + error);
}

}  // namespace captures
