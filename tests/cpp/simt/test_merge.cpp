// The kernel that merges results over two sets of keys: its GPU form, run by simt, against doubles,
// and against the loop that the library runs on a CPU.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "arch/threads.hpp"
#include "check.hpp"
#include "cutlass_attn.hpp"
#include "serving/merge_kernel.hpp"
#include "simt/engine.hpp"

using namespace cutlass_attn;

namespace {

constexpr int kBatch = 2, kHeads = 3, kRows = 5;
constexpr float kUntouched = 1e6f;

// Two results. Row 0 of head 0 saw no key on side a, row 1 none on side b, row 2 none on either.
// Their log-sum-exps say so in both possible ways, and their results are NaN.
struct Pair {
  int dim;
  std::vector<float> a, b, o, lse_a, lse_b, lse;

  explicit Pair(int dim)
      : dim(dim),
        a(size_t(kBatch * kRows * kHeads * dim)),
        b(a.size()),
        o(a.size(), kUntouched),
        lse_a(size_t(kBatch * kHeads * kRows)),
        lse_b(lse_a.size()),
        lse(lse_a.size(), kUntouched) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::vector<float>* x : {&a, &b}) {
      for (float& value : *x) value = normal(random);
    }
    // So far apart that exponentials of most of them overflow any float.
    for (std::vector<float>* x : {&lse_a, &lse_b}) {
      for (float& value : *x) value = 300 + 40 * normal(random);
    }
    for (int i = 0; i < 3; ++i) {
      if (i != 1) lse_a[size_t(i)] = i == 0 ? -INFINITY : INFINITY;
      if (i != 0) lse_b[size_t(i)] = -INFINITY;
      for (int d = 0; d < dim; ++d) {
        if (i != 1) a[size_t(i * kHeads * dim + d)] = NAN;
        if (i != 0) b[size_t(i * kHeads * dim + d)] = NAN;
      }
    }
  }

  MergeProblem problem() {
    auto const rows = [&](std::vector<float>& x) {
      return Operand{x.data(), int64_t(kRows) * kHeads * dim, dim, int64_t(kHeads) * dim,
                     DType::kFloat32};
    };
    auto const numbers = [&](std::vector<float>& x) {
      return PerRow{x.data(), kHeads * kRows, kRows, 1};
    };
    MergeProblem p;
    p.a = rows(a), p.b = rows(b), p.o = rows(o);
    p.lse_a = numbers(lse_a), p.lse_b = numbers(lse_b), p.lse = numbers(lse);
    p.batch = kBatch, p.num_heads = kHeads, p.seqlen = kRows, p.head_dim = dim;
    return p;
  }
};

void run_kernel(MergeProblem const& p, bool is_aligned) {
  using Kernel = serving::MergeKernel<float>;
  serving::MergeParams const params{p, is_aligned};
  Launch const launch = Kernel::launch(params);
  Status const status = simt::run_grid(
      {launch.blocks, launch.threads, launch.smem_bytes}, {},
      [&](char*) { Kernel::run(params, arch::Threads::block(), arch::Threads::thread()); });
  CHECK_EQ(status.message, "");
}

double seen(double lse) { return lse == INFINITY ? -INFINITY : lse; }

void check_against_doubles(Pair const& x) {
  for (int b = 0; b < kBatch; ++b) {
    for (int h = 0; h < kHeads; ++h) {
      for (int r = 0; r < kRows; ++r) {
        size_t const at = size_t((b * kHeads + h) * kRows + r);
        double const lse_a = seen(x.lse_a[at]), lse_b = seen(x.lse_b[at]);
        double const top = std::max(lse_a, lse_b);
        bool const is_empty = top == -INFINITY;
        double const of_a = is_empty ? 0 : std::exp(lse_a - top);
        double const of_b = is_empty ? 0 : std::exp(lse_b - top), total = of_a + of_b;
        CHECK_NEAR(x.lse[at], is_empty ? -INFINITY : top + std::log(total), 1e-4);
        for (int d = 0; d < x.dim; ++d) {
          size_t const i = size_t(((b * kRows + r) * kHeads + h) * x.dim + d);
          double const part_a = of_a == 0 ? 0 : of_a / total * x.a[i];
          double const part_b = of_b == 0 ? 0 : of_b / total * x.b[i];
          CHECK_NEAR(x.o[i], part_a + part_b, 1e-5);
        }
      }
    }
  }
}

}  // namespace

TEST(the_kernel_is_right) {
  for (bool const is_aligned : {true, false}) {
    Pair x(is_aligned ? 72 : 7);
    run_kernel(x.problem(), is_aligned);
    check_against_doubles(x);
  }
}

TEST(the_kernel_equals_the_loop) {
  Pair gpu(40), cpu(40);
  run_kernel(gpu.problem(), true);
  CHECK_EQ(merge_states(cpu.problem(), {}).message, "");
  CHECK(gpu.o == cpu.o);
  CHECK(gpu.lse == cpu.lse);
}

TEST(sides_may_be_exchanged) {
  Pair x(24), y(24);
  std::swap(y.a, y.b);
  std::swap(y.lse_a, y.lse_b);
  run_kernel(x.problem(), true);
  run_kernel(y.problem(), true);
  CHECK(x.o == y.o);
  CHECK(x.lse == y.lse);
}

TEST(bad_requests) {
  Pair x(8);
  auto const message = [&](auto const& change) {
    MergeProblem p = x.problem();
    change(p);
    return merge_states(p, {}).message;
  };
  using P = MergeProblem;
  CHECK_EQ(message([](P& p) { p.head_dim = 577; }), "head_dim is 577, allowed: 1 to 576");
  CHECK_EQ(message([](P& p) { p.b.dtype = DType::kFloat16; }),
           "b is float16, allowed: float32 like a");
  CHECK_EQ(message([](P& p) { p.a.dtype = DType::kFloat64; }),
           "a is float64, allowed: float16, bfloat16, float32");
  CHECK_EQ(message([](P& p) { p.lse_b.data = nullptr; }), "lse_b is null, but there are 30 rows");
  CHECK_EQ(message([](P& p) { p.batch = 0, p.lse.data = nullptr; }), "");
}

int main(int argc, char** argv) { return check::run(argc, argv); }
