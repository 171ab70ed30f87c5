// Grids of one stream that overlap (programmatic dependent launch).
#pragma once

#include "arch/twins.hpp"

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

}  // namespace cutlass_attn::arch
