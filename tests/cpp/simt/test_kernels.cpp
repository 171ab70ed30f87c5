// Every compiled kernel that runs on the CPU, the GPU's among them, on every case: right against
// fp64, and bitwise the same in whatever order threads and blocks run.
#include <string>
#include <vector>

#include "check.hpp"
#include "runtime/registry.hpp"
#include "simt/attention_case.hpp"
#include "simt/engine.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::Problem;

namespace {

void run(Variant const& variant, Case const& what) {
  simt::Schedule const schedules[] = {
      {0, simt::FiberOrder::kForward, 0}, {1, simt::FiberOrder::kForward, 0},
      {1, simt::FiberOrder::kReverse, 0}, {1, simt::FiberOrder::kRandom, 1},
      {3, simt::FiberOrder::kRandom, 2},
  };
  Problem problem(what, variant.info.dtype);
  std::vector<char> first;
  for (simt::Schedule const& schedule : schedules) {
    simt::launch_schedule() = schedule;
    LaunchOptions options;
    options.num_threads = schedule.num_threads;
    Status const status = variant.launch(problem.call(), options);
    std::string error = status.ok() ? problem.verdict() : status.message;
    if (first.empty()) first = problem.outputs();
    if (error.empty() && problem.outputs() != first) error = "results depend on the schedule";
    if (error.empty()) continue;
    check::fail(__FILE__, __LINE__, variant.info.key + ", " + what.name + ": " + error);
    return;
  }
}

TEST(every_kernel_on_every_case) {
  int kernels = 0;
  for (Variant const& variant : registry()) {
    if (variant.info.device != Device::kCpu || !variant.launch) continue;
    ++kernels;
    int const head_dim = variant.info.head_dim;
    for (Case const& what : attention_case::cases(head_dim ? head_dim : 64)) run(variant, what);
    if (head_dim) continue;
    for (Case const& what : attention_case::odd_head_dims()) run(variant, what);
  }
  CHECK(kernels > 0);
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
