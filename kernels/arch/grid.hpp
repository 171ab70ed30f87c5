// Grids of one stream that overlap (programmatic dependent launch).
#pragma once

#include "arch/twins.hpp"
#include "core/launch.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Grid {
  // griddepcontrol.wait: returns when earlier grids of the stream are complete and their writes
  // visible. Before it, a grid that overlaps earlier ones may read only its parameters.
  CUTE_DEVICE static void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  // griddepcontrol.launch_dependents: once all blocks have called this, the next grid may start on
  // free resources.
  CUTE_DEVICE static void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
};

#else

struct Grid {
  static void griddepcontrol_wait() { simt::engine::griddepcontrol_wait(); }
  static void griddepcontrol_launch_dependents() {}
};

#endif

// The first statement of a block of Kernel, or of the launch before or after it. With
// kOverlapsGrids it waits until earlier grids are complete, then lets the next grid start wherever
// SMs have room. That grid waits here in turn, so the latency of its launch is hidden. Kernels with
// kWaitsLater call the two functions themselves.
template <class Kernel>
CUTE_DEVICE void begin_block() {
  if constexpr (Kernel::kOverlapsGrids && !Kernel::kWaitsLater) {
    Kernel::Machine::griddepcontrol_wait();
    Kernel::Machine::griddepcontrol_launch_dependents();
  }
}

}  // namespace cutlass_attn::arch
