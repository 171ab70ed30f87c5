// Vectorised loops, see tile.cpp. Neither option changes a result.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3,no-trapping-math,no-math-errno")
#endif

#include "cpu/quantized.hpp"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/epilogue.hpp"
#include "core/mask.hpp"
#include "core/predict.hpp"
#include "core/quantize.hpp"
#include "core/score.hpp"
#include "cpu/threads.hpp"
#include "cpu/tile_state.hpp"

namespace cutlass_attn::cpu {
namespace {

static_assert(kTileKeys == quantize::kTileKeys, "a panel has the keys of a tile's scales");

struct QuantizedState : State {
  float q_scale[kRows];
  float q_shift[kRows];  // q . shift
  float* shift;          // [head_dim]

  explicit QuantizedState(VarlenSeqInfo const& seq) : State(seq) {}
};

// The integer nearest to x * inverse, rounded as in to_int8(). The product of two floats is exact
// in double, so the sum is rounded once, without a fused multiply-add.
inline float rounded(float x, float inverse) {
  constexpr double kRounder = 6755399441055744.0;  // 1.5 * 2^52
  return float(double(x) * double(inverse) + kRounder - kRounder);
}

// The nearest e4m3 number, ties to even: 3 bits of mantissa; steps of 2^-9 below 2^-6; larger
// magnitudes saturate at 448. NaN stays NaN.
inline float rounded_e4m3(float x) {
  constexpr float kSubnormal = 16384.0f;  // 2^14, from where fp32 has steps of 2^-9
  uint32_t const bits = bits_of(x), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  uint32_t const normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) & ~0xfffffu;
  float const small = float_of(magnitude) + kSubnormal - kSubnormal;
  float const y = magnitude < 0x3c800000u ? small : float_of(normal);
  float const clipped = y > 448.0f ? 448.0f : y;
  return float_of(bits_of(magnitude > 0x7f800000u ? x : clipped) | sign);
}

// The lanes of core/predict.hpp: a single lane.
template <bool kIsGpu_>
struct OneLane {
  static constexpr bool kIsGpu = kIsGpu_;
  static constexpr int kWarps = 1, kLanes = 1, kMaxColumns = kMaxHeadDim;
  static int warp() { return 0; }
  static int lane() { return 0; }
  static void sync() {}
  static void sync_warp() {}
  static float largest(float x) { return x; }
  static float sum(float x) { return x; }
};

#define CA_CPU_BODY "cpu/quantized_body.hpp"
#include "cpu/each_isa.hpp"

}  // namespace

TileFunction quantized_tile_function(Problem const& params, Isa isa) {
  return CA_CPU_CALL(isa, function_for(params));
}

Status predict_errors(Problem const& params, Isa isa, RunOptions const& options, bool is_gpu,
                      float* errors) {
  int64_t const heads = int64_t(params.batch) * params.num_heads_q;
  double const products = double(quantize::predicted_count(params.seq_q.seqlen)) *
                          double(params.seq_k.seqlen) * (params.head_dim + params.head_dim_v);
  double const work = 2.0 * double(heads) * products;
  return run_items(heads, work, 0, options, [&](int64_t i, char*) {
    int const batch = int(i / params.num_heads_q), head = int(i % params.num_heads_q);
    errors[i] = CA_CPU_CALL(isa, predict(params, is_gpu, batch, head));
  });
}

size_t quantized_scratch_size(Problem const& params, int rows) {
  return scratch_size(params, rows) + size_t(params.head_dim);
}

}  // namespace cutlass_attn::cpu
