// The effect of a bug in the wmma kernel on its results. tests/mutants/post_mortem.py compiles this
// file with planted bugs, and an environment variable selects one. Prints one line of JSON: which
// checks pass, then the error at the reference shape against fp64 rounded to fp16.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "simt/wmma_checks.hpp"

using namespace wmma_checks;

namespace {

void measure(LaunchKernel launch, bool causal, simt::FiberOrder order) {
  simt::launch_schedule().order = order;
  KnownProblem problem(2, 8, 512, 0.125f, causal, normal(11), normal(12), normal(13));
  std::vector<half_t> const exact = problem.exact(), o = problem.run(launch);
  double largest = 0, sum = 0, signed_sum = 0;
  int64_t wrong = 0, not_finite = 0, rows = 0;
  for (size_t row = 0; row < o.size() / kHeadDim; ++row) {
    bool is_wrong = false;
    for (size_t i = row * kHeadDim; i < (row + 1) * kHeadDim; ++i) {
      double const error = double(float(o[i])) - float(exact[i]);
      if (!std::isfinite(error)) {
        ++not_finite, is_wrong = true;
        continue;
      }
      largest = std::max(largest, std::fabs(error));
      sum += std::fabs(error), signed_sum += error;
      if (std::fabs(error) >= 1e-3) ++wrong, is_wrong = true;
    }
    rows += is_wrong;
  }
  double const count = double(std::max<size_t>(o.size(), 1));
  std::printf(
      "{\"ran\": %s, \"max\": %.6g, \"mean\": %.4g, \"signed_mean\": %.4g, \"wrong\": %.6g, "
      "\"rows\": %lld, \"not_finite\": %lld}",
      o.empty() ? "false" : "true", largest, sum / count, signed_sum / count, wrong / count,
      static_cast<long long>(rows), static_cast<long long>(not_finite));
}

}  // namespace

// measure_wmma [wide]: fragments of 8 x 32 x 16 at the reference shape.
int main(int argc, char** argv) {
  bool const wide = argc > 1 && std::string(argv[1]) == "wide";
  LaunchKernel const launch = wide ? kWmma<8, 8, 32> : kWmma<8, 16, 16>;
  simt::launch_schedule().poison = false;  // as on a GPU, if a GPU has a unique answer
  std::printf("{\"identity\": %d, ", identity_gives_identity());
  std::printf("\"first_tile\": %d, ", first_tile_is_the_scalar_one(kWmma<4, 16, 16>, 16));
  std::printf("\"one_warp\": %d, ", first_tile_is_the_scalar_one(kWmma<1, 16, 16>, 16));
  std::printf("\"known_values\": %d", known_values_come_back());
  std::pair<char const*, simt::FiberOrder> const orders[] = {
      {"forward", simt::FiberOrder::kForward}, {"random", simt::FiberOrder::kRandom}};
  for (auto const& [name, order] : orders) {
    std::printf(", \"%s\": ", name);
    measure(launch, false, order);
  }
  std::printf(", \"causal\": ");
  measure(launch, true, simt::FiberOrder::kForward);
  std::printf("}\n");
}
