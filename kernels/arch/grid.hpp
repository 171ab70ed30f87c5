// Grids of one stream that overlap (programmatic dependent launch).
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Grid {
  // griddepcontrol.wait: returns when earlier grids of the stream are complete and their writes
  // visible. Before it, a grid that overlaps earlier ones may read only its parameters.
  CUTE_DEVICE static void wait_for_grids_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  // griddepcontrol.launch_dependents: once all blocks have called this, the next grid may start on
  // free resources.
  CUTE_DEVICE static void let_next_grid_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
};

#else

struct Grid {
  static void wait_for_grids_before() { simt::engine::wait_for_grids_before(); }
  static void let_next_grid_begin() {}
};

#endif

}  // namespace cutlass_attn::arch
