// Every compiled kernel that runs on the CPU, including the GPU's, on every case: right against
// fp64, and bitwise equal in every order of threads and blocks.
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "attention_case.hpp"
#include "check.hpp"
#include "runtime/dispatch.hpp"
#include "runtime/options.hpp"
#include "simt/engine.hpp"

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::SolvedCase;

namespace {

constexpr uint32_t kAllOptions = option::softcap | option::negative_scale | option::alibi_slopes |
                                 option::bias | option::mask | option::attention_chunk |
                                 option::sinks | option::dropout;

// In the first two schedules, any two threads run in both orders between one barrier and the next,
// so that a result that depends on their order differs; every third case uses both. The other
// schedules are for a few cases.
simt::Schedule const schedules[] = {
    {0, simt::FiberOrder::kForward, 0}, {1, simt::FiberOrder::kReverse, 0},
    {1, simt::FiberOrder::kForward, 0}, {1, simt::FiberOrder::kRandom, 1},
    {3, simt::FiberOrder::kRandom, 2},
};
enum Schedules { kOne = 1, kTwo = 2, kAll = 5 };

// Bypasses check(), whose limits some cases exceed.
Status run(Variant const& variant, Problem const& problem, RunOptions const& options) {
  if (variant.kernel->function) return variant.kernel->function(problem, options);
  KernelArguments const& arguments = variant.kernel->arguments;
  if (!arguments.has_pre_post()) return launch(arguments, *variant.unit, problem, {}, options);
  // With a launch before the kernel: the kernel may read only what that launch writes over the
  // garbage.
  size_t const bytes = size_t(arguments.workspace_bytes(problem, {}, variant.unit->facts));
  std::vector<char> workspace(bytes, char(0xff));
  RunOptions with_workspace = options;
  with_workspace.workspace = {workspace.data(), int64_t(bytes)};
  return launch(arguments, *variant.unit, problem, {}, with_workspace);
}

// For a kernel that splits the keys of a call: in three parts, with a workspace of garbage, and
// with or without `zeros`.
Status run_split(Variant const& variant, Problem problem, std::vector<int32_t>& zeros) {
  problem.num_splits = 3;
  KernelArguments const& arguments = variant.kernel->arguments;
  size_t const bytes = size_t(arguments.workspace_bytes(problem, {}, variant.unit->facts));
  std::vector<char> workspace(bytes, char(0xff));
  RunOptions options;
  options.workspace = {workspace.data(), int64_t(bytes), zeros.data(), int64_t(zeros.size()) * 4};
  return launch(arguments, *variant.unit, problem, {}, options);
}

// Returns whether the variant can run the case. Split calls have both kinds of workspace in all
// schedules, or take turns from one schedule, and from one case (`turn`), to the next.
bool run(Variant const& variant, Case const& what, SolvedCase& problem, Schedules count, int turn) {
  if (!why_not(variant, problem.call(), device_info(Device::kCpu)).empty()) return false;
  std::vector<char> first;
  for (int i = 0; i < count; ++i) {
    simt::launch_schedule() = schedules[i];
    RunOptions options;
    options.num_threads = schedules[i].num_threads;
    Status const status = run(variant, problem.call(), options);
    std::string error = status.ok() ? problem.verdict() : status.message;
    if (first.empty()) first = problem.outputs();
    if (error.empty() && problem.outputs() != first) error = "results depend on the schedule";
    if (error.empty()) continue;
    check::fail(__FILE__, __LINE__, variant.info.key + ", " + what.name + ": " + error);
    break;
  }
  if (!variant.kernel->arguments.splits) return true;
  std::vector<int32_t> zeros(64);
  for (int i = 0; i < 2 * count; ++i) {
    if (count != kAll && i % 2 != (i / 2 + turn) % 2) continue;
    simt::launch_schedule() = schedules[i / 2];
    std::vector<int32_t> none;
    Status const status = run_split(variant, problem.call(), i % 2 ? none : zeros);
    std::string error = status.ok() ? problem.verdict() : status.message;
    if (error.empty() && zeros != std::vector<int32_t>(64)) error = "zeros are not left as zeros";
    if (error.empty()) continue;
    check::fail(__FILE__, __LINE__, variant.info.key + ", split, " + what.name + ": " + error);
    break;
  }
  return true;
}

// Whether the kernel is for this many queries.
bool has_few_rows(Variant const& variant, Case const& x) {
  int const rows = x.seqlen_q * (x.num_heads_q / x.num_heads_kv);
  return variant.info.max_rows == 0 || rows <= variant.info.max_rows;
}

// Kernels for any head dimension get a short one, and the odd ones.
bool takes_any_head_dim(Variant const& variant) {
  return variant.info.head_dim == 0 || variant.info.head_dim_multiple == 1;
}

// Variants that share answers; answers take as long as some of the kernels.
struct Group {
  DType dtype;
  int head_dim;
  Accumulate accumulate;
  Quantize quantize;

  Group(VariantInfo const& info, int head_dim)
      : dtype(info.dtype),
        head_dim(head_dim),
        accumulate(info.accumulate),
        quantize(info.quantize) {}

  bool operator<(Group const& x) const {
    return std::tie(dtype, head_dim, accumulate, quantize) <
           std::tie(x.dtype, x.head_dim, x.accumulate, x.quantize);
  }
};

// Options of kernels that are only for calls with a bias or a mask.
constexpr uint32_t kOfLogits = option::bias | option::mask;

// Whether such a kernel must run a case with these options.
bool is_made_for(Variant const& variant, Case const& x, uint32_t asked) {
  uint32_t const options = variant.kernel->options, needs = variant.kernel->needs & kOfLogits;
  bool const has_pairs = !x.bias || (!x.bias_is_fp32 && std::strchr(x.bias, 'k'));
  return needs != 0 && (needs & ~asked) == 0 && (asked & ~options) == 0 && has_pairs &&
         x.layout == attention_case::Layout::kContiguous && !*x.unaligned && x.seqlen_k % 2 == 0;
}

// Runs each variant on a list of cases. must_take(variant, case): whether it must run the case.
template <class MustTake>
void run_list(Group const& group, std::vector<Variant const*> const& variants,
              std::vector<Case> const& cases, size_t few, MustTake const& must_take) {
  for (size_t i = 0; i < cases.size(); ++i) {
    Case what = cases[i];
    what.accumulate = group.accumulate;
    what.quantize = group.quantize;
    SolvedCase problem(what, group.dtype);
    uint32_t const asked = options_of(problem.call(), Op::kForward);
    for (Variant const* variant : variants) {
      bool const lacks = variant->kernel->needs & ~asked;
      bool const has_to =
          !lacks && (is_made_for(*variant, what, asked) || must_take(*variant, what));
      Schedules const count = i < few ? kAll : i % 3 == 0 ? kTwo : kOne;
      CHECK(run(*variant, what, problem, count, int(i)) || !has_to);
    }
  }
}

// Whether a variant is in this build and tested here. Other variants are tested by few_sm90.cpp,
// test_backward.cpp, kernels_serving.cpp, tests/call/test_float64.py and, for P and V in 8 bits,
// test_cpu.cpp, kernels_int8.cpp and tests/call/test_quantize_accuracy.py.
bool is_tested(Variant const& variant) {
  VariantInfo const& info = variant.info;
  uint32_t const known = option::dropout | (variant.kernel->tma ? 0 : kOfLogits);
  bool const is_plain = (variant.kernel->needs & ~known) == 0;
  return info.device == Device::kCpu && info.compiled && info.op == Op::kForward &&
         info.dtype != DType::kFloat64 && is_plain && info.quantize <= Quantize::kQk;
}

// Every compiled kernel for few queries.
void run_decode() {
  std::map<Group, std::vector<Variant const*>> groups;
  for (Variant const& variant : registry()) {
    VariantInfo const& info = variant.info;
    if (!is_tested(variant) || info.max_rows == 0) continue;
    groups[{info, info.head_dim}].push_back(&variant);
  }
  CHECK(!groups.empty());
  for (auto const& [group, variants] : groups) {
    run_list(group, variants, attention_case::decode_cases(group.head_dim), 3,
             [](Variant const&, Case const&) { return true; });
  }
}

// Every compiled kernel whose name begins with `scalar/`, or every other one.
void run_all(bool scalar) {
  std::map<Group, std::vector<Variant const*>> groups;
  for (Variant const& variant : registry()) {
    if (!is_tested(variant)) continue;
    if ((variant.info.kernel.find("scalar/") == 0) != scalar) continue;
    int const head_dim = takes_any_head_dim(variant) ? 64 : variant.info.head_dim;
    groups[{variant.info, head_dim}].push_back(&variant);
  }
  CHECK(!groups.empty());
  for (auto const& [group, variants] : groups) {
    int const head_dim = group.head_dim;
    // The lists begin with the few cases.
    run_list(group, variants, attention_case::cases(head_dim),
             attention_case::few_cases(head_dim).size(), [](Variant const& variant, Case const& x) {
               bool const is_scaled = x.softcap == 0 && x.softmax_scale >= 0;  // 0: by default
               bool const is_known = is_scaled || (variant.kernel->options & option::softcap);
               return is_known && has_few_rows(variant, x);
             });
    run_list(group, variants, attention_case::option_cases(head_dim),
             attention_case::few_option_cases(head_dim).size(),
             [](Variant const& variant, Case const& x) {
               bool const is_aligned = *x.unaligned == 0 || variant.kernel->alignment <= 2;
               bool const is_known = (variant.kernel->options & kAllOptions) == kAllOptions;
               return is_known && is_aligned && has_few_rows(variant, x);
             });
    std::vector<Variant const*> of_logits;
    for (Variant const* variant : variants) {
      if (variant->kernel->needs & kOfLogits) of_logits.push_back(variant);
    }
    if (!of_logits.empty()) {
      run_list(group, of_logits, attention_case::logit_cases(head_dim), 0,
               [](Variant const&, Case const&) { return false; });  // is_made_for() says it
    }
    auto const dropout_cases = attention_case::few_dropout_cases(head_dim);
    run_list(group, variants, dropout_cases, dropout_cases.size(),
             [](Variant const& variant, Case const& x) {
               constexpr uint32_t kOptions = option::dropout | option::sinks;
               bool const is_known = (variant.kernel->options & kOptions) == kOptions;
               return is_known && has_few_rows(variant, x);
             });
    run_list(group, variants, attention_case::odd_head_dims(), 0,
             [](Variant const& variant, Case const& x) {
               bool const fits =
                   variant.info.head_dim == 0 || x.head_dim_v <= variant.info.head_dim;
               return takes_any_head_dim(variant) && fits;
             });
  }
}

// Several tests, so that ctest can run them in parallel.
TEST(scalar) { run_all(true); }
TEST(other) { run_all(false); }
TEST(decode) { run_decode(); }

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv); }
