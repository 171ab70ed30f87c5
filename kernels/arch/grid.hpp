// Grids of one stream that overlap (programmatic dependent launch).
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Grid {
  // griddepcontrol.wait: afterwards previous grids of the stream are complete, and their writes are
  // visible. In a grid that overlaps previous ones, a kernel may read only its parameters before
  // this.
  CUTE_DEVICE static void wait_for_grids_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  // griddepcontrol.launch_dependents: the next grid may begin, once all blocks have called this, as
  // far as resources allow.
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
