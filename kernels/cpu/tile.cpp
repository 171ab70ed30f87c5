// g++ vectorises the loops of conversions and of the softmax only at -O3, and, without mask
// registers, only if it may evaluate both sides of a condition. Neither option changes a result.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3,no-trapping-math,no-math-errno")
#endif

#include "cpu/tile.hpp"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/epilogue.hpp"
#include "core/general_score.hpp"
#include "core/mask.hpp"
#include "cpu/tile_state.hpp"

namespace cutlass_attn::cpu {
namespace {

#define CA_CPU_BODY "cpu/tile_body.hpp"
#include "cpu/each_isa.hpp"

}  // namespace

Isa best_isa() {
#ifdef CA_CPU_HAS_X86
  if (__builtin_cpu_supports("fma")) {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return Isa::kAvx512;
    }
    if (__builtin_cpu_supports("avx2")) return Isa::kAvx2;
  }
#endif
  return Isa::kBaseline;
}

TileFunction tile_function(Problem const& params, Isa isa) {
  return CA_CPU_CALL(isa, function_for(params));
}

size_t scratch_size(Problem const& params, int rows) {
  size_t const head_dims = size_t(params.head_dim) + size_t(params.head_dim_v);
  size_t const queries_and_output = (size_t(rows) + kMaxLanes) * head_dims;
  size_t const scores = size_t(kMaxBlock) * kTileKeys;
  size_t const panels = size_t(kTileKeys) * head_dims;
  return queries_and_output + scores + panels;
}

}  // namespace cutlass_attn::cpu
