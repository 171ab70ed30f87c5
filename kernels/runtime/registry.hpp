// The tables of variants and of tiles: generated from manifest.toml and tuned.toml, and what
// add_tile(), prefer_tile() and mark_failing() made of them before anybody looked.
#pragma once

#include <string>
#include <vector>

#include "cutlass_attn.hpp"
#include "runtime/manifest.hpp"
#include "runtime/options.hpp"

namespace cutlass_attn {

struct Variant {
  VariantInfo info;
  ManifestKernel const* kernel;
  int block_m, block_n;    // of its tile; 0: it has no choice of tile
  TileCost cost;           // predicted; dispatch takes the lowest of those that can run
  KernelUnit const* unit;  // null where it is not compiled, and of the CPU's own kernel
  bool is_simt;
  bool can_load;         // a GPU kernel of which scores may be compiled at run time: see loaded.hpp
  std::string symbol;    // what the names of its entries begin with
  int plain_scores = 0;  // as in ManifestRow
};

// Whether this build has a variant without the code of this score, which may be loaded.
inline bool is_left_out(Variant const& variant, int score) {
  return variant.can_load && !(variant.unit && variant.unit->device_code[score]);
}

// In order of preference. The first call ends what can be added.
std::vector<Variant> const& registry();

std::vector<TileRule> const& rules_in_force();

// Why other tiles are preferred to this variant on GPUs of a class; empty if none are.
std::string const& why_failing(int smem_kb, std::string const& key);

}  // namespace cutlass_attn
