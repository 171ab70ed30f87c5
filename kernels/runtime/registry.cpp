#include "runtime/registry.hpp"

#define CA_LAUNCHER(symbol)                               \
  namespace cutlass_attn {                                \
  Status symbol(AttnParams const&, LaunchOptions const&); \
  }
#include "registry_launchers.inc"
#undef CA_LAUNCHER

namespace cutlass_attn {

std::vector<Variant> const& registry() {
  static std::vector<Variant> const table = {
#define CA_VARIANT(launch, kernel, key, device, dtype, head_dim, tile, tier, compiled, automatic, \
                   min_compute_capability, alignment)                                             \
  Variant{{key, kernel, device, dtype, head_dim, tile, tier, compiled, automatic},                \
          min_compute_capability,                                                                 \
          alignment,                                                                              \
          launch},
#include "registry_table.inc"
#undef CA_VARIANT
  };
  return table;
}

}  // namespace cutlass_attn
