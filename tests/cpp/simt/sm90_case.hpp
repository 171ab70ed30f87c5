// Runs the wgmma forward kernel on the engine and judges it against fp64: on a multiprocessor for
// every tile, on one and on three, in three orders of threads.
#pragma once

#include <string>
#include <vector>

#include "attention_case.hpp"
#include "check.hpp"
#include "core/alignment.hpp"
#include "runtime/options.hpp"
#include "simt/host_unit.hpp"
#include "sm90/forward.hpp"

namespace sm90_case {

using namespace cutlass_attn;
using attention_case::Case;
using attention_case::SolvedCase;

// On so many multiprocessors: 0 has a block for every tile.
template <class Kernel>
Status launch(Problem const& problem, int num_sms) {
  static KernelUnit const unit =
      simt::host_unit<Kernel, IdentityScore, SoftcapScore, ChunkedScore>();
  constexpr KernelArguments arguments =
      arguments_of<typename Kernel::Params, IdentityScore, SoftcapScore, ChunkedScore>();
  DeviceLimits limits;
  limits.num_sms = num_sms;
  std::vector<int32_t> zeros(16);
  RunOptions options;
  options.num_threads = 1;
  options.workspace.zeros = zeros.data();
  options.workspace.zeros_bytes = 64;
  Status const status = cutlass_attn::launch(arguments, unit, problem, limits, options);
  if (status.ok() && zeros != std::vector<int32_t>(16)) {
    return Status::device_error("the counter is not left at 0");
  }
  return status;
}

inline bool takes(Problem const& p) {
  uint32_t const known =
      option::softcap | option::negative_scale | option::attention_chunk | option::sinks;
  return (options_of(p, Op::kForward) & ~known) == 0 && address_bits(p, 2) % 16 == 0 &&
         p.head_dim % 8 == 0;
}

template <class Kernel>
void check_case(Case const& what, DType dtype, int& runs) {
  SolvedCase problem(what, dtype);
  if (!takes(problem.call())) return;
  std::vector<char> first;
  using Order = simt::FiberOrder;
  struct Run {
    int num_sms;
    Order order;
  };
  for (auto const [num_sms, order] :
       {Run{0, Order::kForward}, Run{1, Order::kReverse}, Run{1, Order::kForward},
        Run{1, Order::kRandom}, Run{3, Order::kRandom}}) {
    simt::launch_schedule() = {1, order};
    Status const status = launch<Kernel>(problem.call(), num_sms);
    std::string error = status.ok() ? problem.verdict() : status.message;
    if (first.empty()) first = problem.outputs();
    if (error.empty() && problem.outputs() != first) error = "results depend on the schedule";
    if (!error.empty()) {
      check::fail(__FILE__, __LINE__,
                  what.name + ", " + std::to_string(num_sms) + " multiprocessors: " + error);
      return;
    }
  }
  ++runs;
}

}  // namespace sm90_case
