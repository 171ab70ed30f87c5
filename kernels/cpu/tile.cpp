// g++ vectorises the loops of conversions and of the softmax only at -O3, and where no mask
// registers exist only if it may evaluate both sides of a condition. Neither changes a result.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3,no-trapping-math,no-math-errno")
#endif

#include "cpu/tile.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/dropout.hpp"
#include "core/epilogue.hpp"
#include "core/mask.hpp"
#include "core/score.hpp"
#include "core/softmax.hpp"
#include "cpu/element.hpp"

namespace cutlass_attn::cpu {
namespace {

constexpr int kMaxLanes = 16;
constexpr int kMaxBlock = 48;

// Rows of K or V as fp32.
struct Panel {
  float const* data;
  int64_t stride;
};

// What a tile keeps from one tile of keys to the next. Rows are padded to whole vectors.
struct State {
  static constexpr int kRows = kTileRows + kMaxLanes;
  VarlenSeqInfo seq;  // the batch entry
  int32_t head[kRows], query[kRows], lo[kRows], hi[kRows];
  SoftmaxRow softmax[kRows];
  float scale[kRows];  // what finishes a row of O
  float* q;            // [block][head_dim][row]
  float* o;            // [block][head_dim_v][row], not yet divided by the sum
  float* s;            // [key][row] of one block: scores, then weights

  explicit State(VarlenSeqInfo const& seq) : seq(seq) {}
};

// The rows of a block as an operand with one entry per logit sees them.
struct Entries {
  int64_t offset[kMaxBlock];  // of key 0, in elements
  bool is_same;               // for all rows

  Entries(PerLogit const& t, State const& state, int row, int width) : is_same(true) {
    for (int r = 0; r < width; ++r) {
      offset[r] = state.seq.batch * t.batch_stride + state.head[row + r] * t.head_stride +
                  state.query[row + r] * t.row_stride;
      is_same &= offset[r] == offset[0];
    }
  }
};

// How a bias and a mask of bytes change a logit.
struct MaskByte {
  uint8_t is_visible;
};
inline float with_entry(float logit, MaskByte mask) { return mask.is_visible ? logit : -kInf; }
template <class Bias>
float with_entry(float logit, Bias bias) {
  return logit + to_float(bias);
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CA_CPU_HAS_X86 1

namespace avx512 {
#define CA_CPU_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")))
#define CA_CPU_LANES 16
#define CA_CPU_VECTORS 3
#define CA_CPU_COUNT 8
#include "cpu/tile_body.hpp"
}  // namespace avx512

namespace avx2 {
#define CA_CPU_TARGET __attribute__((target("avx2,fma")))
#define CA_CPU_LANES 8
#define CA_CPU_VECTORS 2
#define CA_CPU_COUNT 6
#include "cpu/tile_body.hpp"
}  // namespace avx2

#endif

namespace baseline {
#define CA_CPU_TARGET
#define CA_CPU_LANES 4
#define CA_CPU_VECTORS 2
#define CA_CPU_COUNT 4
#include "cpu/tile_body.hpp"
}  // namespace baseline

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
  switch (isa) {
#ifdef CA_CPU_HAS_X86
    case Isa::kAvx512:
      return avx512::function_for(params);
    case Isa::kAvx2:
      return avx2::function_for(params);
#endif
    default:
      return baseline::function_for(params);
  }
}

size_t scratch_size(Problem const& params, int rows) {
  size_t const head_dims = size_t(params.head_dim) + size_t(params.head_dim_v);
  size_t const queries_and_output = (size_t(rows) + kMaxLanes) * head_dims;
  size_t const scores = size_t(kMaxBlock) * kTileKeys;
  size_t const panels = size_t(kTileKeys) * head_dims;
  return queries_and_output + scores + panels;
}

}  // namespace cutlass_attn::cpu
