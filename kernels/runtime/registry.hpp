// The tables of variants and of tiles: generated from manifest.toml and tuned.toml, and what
// add_tile(), prefer_tile() and mark_failing() made of them before anybody looked.
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

// In order of preference. The first call ends what can be added.
std::vector<Variant> const& registry();

std::vector<TileRule> const& rules_in_force();

// Why other tiles are preferred to this variant on GPUs of a class; empty if none are.
std::string const& why_failing(int smem_kb, std::string const& key);

}  // namespace cutlass_attn
