// Attention from C++ on the CPU, checked against the textbook formula.
//
// The call is the same on a GPU: device addresses in the operands, LaunchOptions::device = kCuda
// and the stream.
#include <cutlass_attn.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <random>
#include <vector>

namespace {

constexpr int kHeads = 4, kSeqlenQ = 50, kSeqlenK = 70, kHeadDim = 40;

// A dense (1, heads, rows, kHeadDim) operand.
cutlass_attn::Operand dense(std::vector<float>& data, int rows) {
  return {data.data(), int64_t(kHeads) * rows * kHeadDim, int64_t(rows) * kHeadDim, kHeadDim};
}

// Element d of softmax(q K^T / sqrt(D)) V under a causal mask aligned bottom-right.
double expected(std::vector<float> const& q, std::vector<float> const& k,
                std::vector<float> const& v, int head, int row, int d) {
  double weighted = 0, total = 0;
  for (int key = 0; key <= row + kSeqlenK - kSeqlenQ; ++key) {
    double logit = 0;
    for (int i = 0; i < kHeadDim; ++i) {
      logit += double(q[(head * kSeqlenQ + row) * kHeadDim + i]) *
               k[(head * kSeqlenK + key) * kHeadDim + i];
    }
    double const weight = std::exp(logit / std::sqrt(double(kHeadDim)));
    total += weight;
    weighted += weight * v[(head * kSeqlenK + key) * kHeadDim + d];
  }
  return weighted / total;
}

}  // namespace

int main() {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<float> q(kHeads * kSeqlenQ * kHeadDim), k(kHeads * kSeqlenK * kHeadDim), v(k), o(q);
  for (auto* operand : {&q, &k, &v}) {
    for (float& x : *operand) x = normal(random);
  }

  cutlass_attn::Problem problem;
  problem.q = dense(q, kSeqlenQ);
  problem.k = dense(k, kSeqlenK);
  problem.v = dense(v, kSeqlenK);
  problem.o = dense(o, kSeqlenQ);
  problem.set_dtype(cutlass_attn::DType::kFloat32);
  problem.batch = 1;
  problem.num_heads_q = problem.num_heads_kv = kHeads;
  problem.seq_q.seqlen = kSeqlenQ;
  problem.seq_k.seqlen = kSeqlenK;
  problem.head_dim = problem.head_dim_v = kHeadDim;
  problem.logits.softmax_scale = 1.0f / std::sqrt(float(kHeadDim));
  problem.mask.causal = true;

  cutlass_attn::LaunchOptions options;
  auto const device = cutlass_attn::device_info(options.device, options.device_index);
  cutlass_attn::Plan plan;
  auto status =
      cutlass_attn::plan(problem, cutlass_attn::Op::kForward, device, options.kernel, plan);
  if (status.ok()) {
    std::cout << "kernel " << cutlass_attn::key_of(*plan.steps[0]) << "\n";
    status = cutlass_attn::run(plan, problem, options);
  }
  if (!status.ok()) {
    std::cerr << status.message << "\n";
    return 1;
  }

  double worst = 0;
  for (int head = 0; head < kHeads; ++head) {
    for (int row = 0; row < kSeqlenQ; ++row) {
      for (int d = 0; d < kHeadDim; ++d) {
        double const got = o[(head * kSeqlenQ + row) * kHeadDim + d];
        worst = std::max(worst, std::abs(got - expected(q, k, v, head, row, d)));
      }
    }
  }
  std::cout << "largest error " << worst << "\n";
  return worst < 1e-5 ? 0 : 1;
}
