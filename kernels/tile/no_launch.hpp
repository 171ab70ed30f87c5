// For a kernel without a pre-launch or post-launch (simt/kernel_unit.hpp). Never launched.
#pragma once

#include <cute/config.hpp>

namespace cutlass_attn {

template <class Params>
struct NoLaunch {
  static constexpr int kThreads = 32, kSmemBytes = 0;
  template <class Arch>
  CUTE_DEVICE static void run(Params const&, char*) {}
};

}  // namespace cutlass_attn
