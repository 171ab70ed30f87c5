// One unit of kernels on a few cases, built with ThreadSanitizer. It fails for an error of the
// engine, a wrong number, or a data race (the sanitizer's exit status). The mutants run it as well.
// test_first.hpp says in which order.
#include <cstdio>
#include <string>
#include <vector>

#include "attention_case.hpp"
#include "simt/engine.hpp"
#include "simt/kernels_under_test.hpp"
#include "simt/sanitized.hpp"
#include "simt/test_first.hpp"

using namespace cutlass_attn;

int main() {
  constexpr simt::FiberOrder kOrders[] = {simt::FiberOrder::kForward, simt::FiberOrder::kReverse};
  int call = 0;
  for (KernelUnderTest const& kernel : test_first::sorted(kernels_under_test())) {
    std::vector<attention_case::Case> cases = kernel.is_decode
                                                  ? attention_case::decode_cases(kernel.head_dim)
                                                  : attention_case::few_cases(kernel.head_dim);
    if (kernel.is_decode) cases.resize(6);
    if (kernel.drops) cases = attention_case::few_dropout_cases(kernel.head_dim);
    if (kernel.has_alibi) cases = attention_case::few_alibi_cases(kernel.head_dim);
    if (kernel.cases) cases = kernel.cases(kernel.head_dim);
    if (kernel.takes_options) {
      for (auto& what : attention_case::few_option_cases(kernel.head_dim)) {
        if (kernel.takes_unaligned || *what.unaligned == 0) cases.push_back(what);
      }
    }
    for (attention_case::Case what : test_first::sorted(cases)) {
      what.accumulate = kernel.accumulate;
      what.fp8_kv = kernel.fp8_kv;
      what.quantize = kernel.quantize;
      attention_case::SolvedCase problem(what, kernel.dtype);
      ++call;
      for (int run = 0; run < 2; ++run) {
        if (is_left_out(run, call)) continue;
        simt::FiberOrder const order = kOrders[run];
        simt::launch_schedule().order = order;
        simt::launch_schedule().halves_e4m3 = order == simt::FiberOrder::kReverse;
        Status const status = kernel.launch(problem.call(), {});
        std::string const error = status.ok() ? problem.verdict() : status.message;
        if (error.empty()) continue;
        std::printf("%s, %s: %s\n", kernel.name, what.name.c_str(), error.c_str());
        return 1;  // the first failure is enough: mutants have many
      }
    }
  }
  return 0;
}
