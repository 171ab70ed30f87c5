// Runs the wgmma kernel that splits keys on the engine and compares it to fp64, in three thread
// orders.
#pragma once

#include "simt/sm90_case.hpp"
#include "sm90/split_keys.hpp"

namespace split_keys_case {

using sm90_case::Case;
using sm90_case::DType;
using sm90_case::Order;

// blocks: blocks of a cluster.
template <class Kernel>
void check(Case const& what, DType dtype, int blocks, int& runs) {
  std::vector<sm90_case::SolvedCase> cases{sm90_case::SolvedCase(what, dtype)};
  cutlass_attn::Problem problem = cases[0].call();
  problem.num_splits = blocks;
  sm90_case::check_calls(what.name + ", clusters of " + std::to_string(blocks), cases,
                         [&](int num_sms) { return sm90_case::launch<Kernel>(problem, num_sms); },
                         runs, {{0, Order::kForward}, {0, Order::kReverse}, {0, Order::kRandom}});
}

}  // namespace split_keys_case
