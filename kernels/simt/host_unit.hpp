// A translation unit of a GPU kernel for the CPU: simt runs the type that kernel_unit.hpp compiles
// for the GPU.
#pragma once

#include "arch/grid.hpp"
#include "arch/sm80.hpp"
#include "core/general_score.hpp"
#include "runtime/kernel.hpp"
#include "simt/engine.hpp"

namespace cutlass_attn::simt {

template <class Kernel, class Score>
Status run_on_host(void const* params, Launch const& launch, RunOptions const& options) {
  Schedule schedule = launch_schedule();
  schedule.num_threads = options.num_threads;
  auto const& arguments = *static_cast<typename Kernel::Params const*>(params);
  return run_grid(
      {launch.blocks, launch.threads, launch.smem_bytes, launch.cluster, launch.overlaps}, schedule,
      [&](char* smem) {
        arch::begin_block<Kernel>();
        Kernel::template run<Score, typename Kernel::Machine>(arguments, smem);
      });
}

template <class Kernel, class PrePost>
Status run_pre_post_on_host(void const* params, Launch const& launch, RunOptions const& options) {
  Schedule schedule = launch_schedule();
  schedule.num_threads = options.num_threads;
  auto const& arguments = *static_cast<typename Kernel::Params const*>(params);
  return run_grid({launch.blocks, launch.threads, launch.smem_bytes, 1, launch.overlaps}, schedule,
                  [&](char* smem) {
                    arch::begin_block<Kernel>();
                    PrePost::template run<typename Kernel::Machine>(arguments, smem);
                  });
}

template <class Kernel, class... Scores>
KernelUnit host_unit() {
  return {facts_of<Kernel>(), {}, {&run_on_host<Kernel, Scores>...}};
}

template <class Kernel, class... Scores>
KernelUnit host_unit_with_pre_post() {
  return {facts_of<Kernel>(),
          {},
          {&run_on_host<Kernel, Scores>...},
          {},
          {&run_pre_post_on_host<Kernel, typename Kernel::Before>,
           &run_pre_post_on_host<Kernel, typename Kernel::After>}};
}

// For tests: runs a kernel type that is not in the manifest.
template <class Kernel, class... Scores>
Status launch_on_host(Problem const& problem, RunOptions const& options) {
  static KernelUnit const unit = host_unit<Kernel, Scores...>();
  constexpr KernelArguments arguments = arguments_of<typename Kernel::Params, Scores...>();
  return launch(arguments, unit, problem, {}, options);
}
template <class Kernel, class... Scores>
Status launch_with_pre_post_on_host(Problem const& problem, RunOptions const& options,
                                    DeviceLimits const& device = {}) {
  static KernelUnit const unit = host_unit_with_pre_post<Kernel, Scores...>();
  constexpr KernelArguments arguments =
      arguments_with_pre_post_of<typename Kernel::Params, Scores...>();
  return launch(arguments, unit, problem, device, options);
}

}  // namespace cutlass_attn::simt
