// One unit of kernels on a few cases, built with ThreadSanitizer: an error of the engine, a wrong
// number, or a data race (the sanitizer's exit status) fails it. Also what the mutants run.
#include <cstdio>
#include <string>
#include <vector>

#include "attention_case.hpp"
#include "simt/engine.hpp"
#include "simt/kernels_under_test.hpp"

using namespace cutlass_attn;

int main() {
  for (KernelUnderTest const& kernel : kernels_under_test()) {
    std::vector<attention_case::Case> cases = attention_case::few_cases(kernel.head_dim);
    if (kernel.takes_options) {
      for (auto& what : attention_case::few_option_cases(kernel.head_dim)) {
        if (kernel.takes_unaligned || *what.unaligned == 0) cases.push_back(what);
      }
    }
    for (attention_case::Case& what : cases) {
      what.accumulate = kernel.accumulate;
      attention_case::Problem problem(what, kernel.dtype);
      for (simt::FiberOrder order : {simt::FiberOrder::kForward, simt::FiberOrder::kReverse}) {
        simt::launch_schedule().order = order;
        Status const status = kernel.launch(problem.call(), {});
        std::string const error = status.ok() ? problem.verdict() : status.message;
        if (error.empty()) continue;
        std::printf("%s, %s: %s\n", kernel.name, what.name.c_str(), error.c_str());
        return 1;  // the first is enough: mutants have many
      }
    }
  }
  return 0;
}
