// Every compiled kernel that runs on the CPU, the GPU's among them, on every case: right against
// fp64, and bitwise the same in whatever order threads and blocks run.
#include <string>
#include <vector>

#include "attention_case.hpp"
#include "check.hpp"
#include "runtime/dispatch.hpp"
#include "runtime/options.hpp"
#include "simt/engine.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::Problem;

namespace {

constexpr uint32_t kAllOptions = option::softcap | option::negative_scale | option::alibi_slopes |
                                 option::bias | option::mask | option::sinks | option::dropout;

// Returns whether the variant takes the case.
bool run(Variant const& variant, Case what) {
  what.accumulate = variant.info.accumulate;
  simt::Schedule const schedules[] = {
      {0, simt::FiberOrder::kForward, 0}, {1, simt::FiberOrder::kForward, 0},
      {1, simt::FiberOrder::kReverse, 0}, {1, simt::FiberOrder::kRandom, 1},
      {3, simt::FiberOrder::kRandom, 2},
  };
  Problem problem(what, variant.info.dtype);
  if (!why_not(variant, problem.call(), device_info(Device::kCpu)).empty()) return false;
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
    break;
  }
  return true;
}

// Every compiled kernel whose name begins with `scalar/`, or every other one.
void run_all(bool scalar) {
  int kernels = 0;
  for (Variant const& variant : registry()) {
    if (variant.info.device != Device::kCpu || !variant.launch) continue;
    if ((variant.info.kernel.find("scalar/") == 0) != scalar) continue;
    ++kernels;
    // Those that take any head dimension get a short one, and the odd ones.
    bool const takes_any = variant.info.head_dim == 0 || variant.info.head_dim_multiple == 1;
    int const head_dim = takes_any ? 64 : variant.info.head_dim;
    bool const has_softcap = variant.options & option::softcap;
    for (Case const& what : attention_case::cases(head_dim)) {
      bool const is_scaled = what.softcap == 0 && what.softmax_scale >= 0;  // 0: by default
      CHECK(run(variant, what) || !(has_softcap || is_scaled));
    }
    bool const has_all_options = variant.options == kAllOptions;
    for (Case const& what : attention_case::option_cases(head_dim)) {
      bool const is_aligned = *what.unaligned == 0 || variant.alignment <= 2;
      CHECK(run(variant, what) || !has_all_options || !is_aligned);
    }
    for (Case const& what : attention_case::odd_head_dims()) {
      bool const fits = variant.info.head_dim == 0 || what.head_dim_v <= variant.info.head_dim;
      CHECK(run(variant, what) || !takes_any || !fits);
    }
  }
  CHECK(kernels > 0);
}

// Two tests, so that ctest can run them side by side.
TEST(scalar) { run_all(true); }
TEST(other) { run_all(false); }

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
