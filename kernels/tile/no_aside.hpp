// An empty launch before or after a kernel (an aside, simt/kernel_unit.hpp). It is never launched.
#pragma once

#include <cute/config.hpp>

namespace cutlass_attn {

template <class Params>
struct NoAside {
  static constexpr int kThreads = 32, kSmemBytes = 0;
  template <class Arch>
  CUTE_DEVICE static void run(Params const&, char*) {}
};

}  // namespace cutlass_attn
