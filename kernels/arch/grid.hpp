// Grids of one stream that overlap (programmatic dependent launch).
#pragma once

#include "arch/twins.hpp"

namespace cutlass_attn::arch {

#if defined(CA_DEVICE_TWIN)

struct Grid {
  // What grids before have written is there, and they read nothing any more. Where a grid was
  // launched to begin before they are done, nothing but its parameters may be read until then.
  CUTE_DEVICE static void wait_for_grids_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  // The next grid may begin, once all blocks have said so, as far as there is room.
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
