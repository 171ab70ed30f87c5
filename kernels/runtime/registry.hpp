// The tables of variants and of tiles, generated from manifest.toml and tuned.toml.
#pragma once

#include <vector>

#include "cutlass_attn.hpp"
#include "runtime/image.hpp"
#include "runtime/options.hpp"

namespace cutlass_attn {

struct Variant {
  VariantInfo info;

  // What the kernel asks of a call, as data of the manifest.
  uint32_t options = 0;  // bits of option:: that it implements
  int min_compute_capability = 0;
  int alignment = 1;  // bytes: of every operand address and stride

  int block_m = 0;  // queries of its tile; 0: it has no choice of tile

  // For calls that check() and why_not() have passed, with at least one query row. Null where the
  // variant is not compiled.
  Status (*launch)(AttnParams const&, LaunchOptions const&) = nullptr;

  // Of a GPU kernel that is not compiled and may be at run time: see loaded.hpp.
  KernelFacts const* facts = nullptr;
};

// In order of preference.
std::vector<Variant> const& registry();

// On GPUs with so much shared memory an SM: the tile of a kernel at these head dims for calls with
// at least min_blocks_per_sm tiles of queries an SM. The first rule that holds wins.
struct TunedTile {
  int smem_kb;
  char const* kernel;
  int head_dim, head_dim_v;
  char const* tile;
  float min_blocks_per_sm;
};

std::vector<TunedTile> const& tuned_tiles();

}  // namespace cutlass_attn
