// The tables of variants and tile rules: generated from manifest.toml and tuned.toml, and changed
// by add_tile(), prefer_tile() and mark_failing() before first use.
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
  int min_head_dim;        // as in ManifestRow
  int block_m, block_n;    // of its tile; 0: no choice of tile
  TileCost cost;           // predicted; dispatch takes the lowest of the variants that can run
  KernelUnit const* unit;  // null if it is not compiled, and for the CPU's own kernel
  bool is_simt;
  bool can_load;         // a GPU kernel whose scores may be compiled at run time: see loaded.hpp
  std::string symbol;    // prefix of the names of its entries
  int plain_scores = 0;  // as in ManifestRow
};

// Whether this build has the variant without the code of this score, which may be loaded later.
inline bool is_left_out(Variant const& variant, int score) {
  return variant.can_load && !(variant.unit && variant.unit->device_code[score]);
}

// All variants in order of preference. After the first call, nothing can be added.
std::vector<Variant> const& registry();

std::vector<TileRule> const& rules_in_force();

// Why other tiles are preferred to this variant on a class of GPUs; empty if none are.
std::string const& why_failing(int smem_kb, std::string const& key);

}  // namespace cutlass_attn
