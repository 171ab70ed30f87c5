// The table of variants, generated from manifest.toml.
#pragma once

#include <vector>

#include "cutlass_attn.hpp"

namespace cutlass_attn {

struct Variant {
  VariantInfo info;

  // What the kernel asks of a call, as data of the manifest.
  int min_compute_capability = 0;
  int alignment = 1;  // bytes: of every operand address and stride

  // For calls that check() and why_not() have passed, with at least one query row. Null where the
  // variant is not compiled.
  Status (*launch)(AttnParams const&, LaunchOptions const&) = nullptr;
};

// In order of preference.
std::vector<Variant> const& registry();

}  // namespace cutlass_attn
