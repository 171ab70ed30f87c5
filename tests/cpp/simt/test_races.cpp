// One unit of kernels on a few cases, built with ThreadSanitizer. It fails for an error of the
// engine, a wrong number, or a data race (the sanitizer's exit status). The mutants run it as well.
//
//   TEST_FIRST    a text: kernels and cases whose names share words with it run first, so that a
//                 bug that the text is about is found sooner
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention_case.hpp"
#include "simt/engine.hpp"
#include "simt/kernels_under_test.hpp"

using namespace cutlass_attn;

namespace {

// How many words of a name, except short ones, are in a text.
int words_in(std::string const& name, std::string const& text) {
  int count = 0;
  auto const is_letter = [](unsigned char c) { return std::isalnum(c) != 0; };
  for (auto begin = name.begin(); begin != name.end();) {
    begin = std::find_if(begin, name.end(), is_letter);
    auto const end = std::find_if_not(begin, name.end(), is_letter);
    count += end - begin >= 3 && text.find(std::string(begin, end)) != std::string::npos;
    begin = end;
  }
  return count;
}

template <class T>
void sort_by_words(std::vector<T>& list, std::string const& text) {
  std::stable_sort(list.begin(), list.end(), [&](T const& a, T const& b) {
    return words_in(a.name, text) > words_in(b.name, text);
  });
}

}  // namespace

int main() {
  char const* const test_first = std::getenv("TEST_FIRST");
  std::string const first = test_first ? test_first : "";
  std::vector<KernelUnderTest> kernels = kernels_under_test();
  sort_by_words(kernels, first);
  for (KernelUnderTest const& kernel : kernels) {
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
    sort_by_words(cases, first);
    for (attention_case::Case& what : cases) {
      what.accumulate = kernel.accumulate;
      what.fp8_kv = kernel.fp8_kv;
      what.quantize = kernel.quantize;
      attention_case::SolvedCase problem(what, kernel.dtype);
      for (simt::FiberOrder order : {simt::FiberOrder::kForward, simt::FiberOrder::kReverse}) {
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
