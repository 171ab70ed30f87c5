// Launch of a kernel type on the CPU: the same type that device_launch.hpp runs on the GPU.
#pragma once

#include "core/scheduler.hpp"
#include "core/score.hpp"
#include "cutlass_attn.hpp"
#include "simt/host.hpp"

namespace cutlass_attn::simt {

template <class Kernel, class Score>
Status launch_one_host(AttnParams const& params, LaunchOptions const& options) {
  Schedule schedule = launch_schedule();
  schedule.num_threads = options.num_threads;
  TileScheduler const scheduler(params, Kernel::kBlockM, Kernel::kPacksHeads);
  return run_grid({scheduler.blocks, Kernel::kThreads, Kernel::kSmemBytes}, schedule,
                  [&](char* smem) { Kernel::template run<Score, Host>(params, scheduler, smem); });
}

// Runs `Kernel` with the first of the Scores that takes the call; returns when it is done.
template <class Kernel, class... Scores>
Status launch_host(AttnParams const& params, LaunchOptions const& options) {
  Status status = Status::no_kernel("no score functor takes this call");
  bool const launched = ((Scores::takes(params) &&
                          (status = launch_one_host<Kernel, Scores>(params, options), true)) ||
                         ...);
  (void)launched;
  return status;
}

}  // namespace cutlass_attn::simt
