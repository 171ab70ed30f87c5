#include "runtime/registry.hpp"

#define CA_LAUNCHER(symbol)                               \
  namespace cutlass_attn {                                \
  Status symbol(AttnParams const&, LaunchOptions const&); \
  }
#define CA_FACTS(symbol)           \
  namespace cutlass_attn {         \
  extern KernelFacts const symbol; \
  }
#include "registry_launchers.inc"
#undef CA_LAUNCHER
#undef CA_FACTS

namespace cutlass_attn {

std::vector<Variant> const& registry() {
  static std::vector<Variant> const table = {
#define CA_VARIANT(launch, facts, kernel, key, device, dtype, head_dim, head_dim_v,      \
                   head_dim_multiple, options, block_m, tile, tier, compiled, automatic, \
                   min_compute_capability, alignment)                                    \
  Variant{{key, kernel, device, dtype, head_dim, head_dim_v, head_dim_multiple, tile,    \
           option_names(options), tier, compiled, automatic},                            \
          options,                                                                       \
          min_compute_capability,                                                        \
          alignment,                                                                     \
          block_m,                                                                       \
          launch,                                                                        \
          facts},
#include "registry_table.inc"
#undef CA_VARIANT
  };
  return table;
}

std::vector<TunedTile> const& tuned_tiles() {
  static std::vector<TunedTile> const table = {
#define CA_TUNED(smem_kb, kernel, head_dim, head_dim_v, tile, min_blocks_per_sm) \
  {smem_kb, kernel, head_dim, head_dim_v, tile, min_blocks_per_sm},
#include "tuned_table.inc"
#undef CA_TUNED
  };
  return table;
}

}  // namespace cutlass_attn
