// Launch parameters of the mma.sync forward kernel with Q K^T in int8, and its workspace:
//
//   k8       (head, key, columns) int8     K rounded as in core/quantize.hpp. A head is a KV head
//                                          of a batch entry. Keys are padded to 64 and columns to
//                                          32, with zeros. Each 16 columns are in the order of
//                                          permuted_column()
//   v8       (head, pair, columns, 2)      V, if P V is in 8 bits. The two keys of a pair are
//                                          neighbours. The pairs of each 16 keys are in the order
//                                          of pair_row()
//   scales   (head, tile) TileScales       one per tile of 64 keys
//   shift    (head, columns) fp32          subtracted from K
//   kReadableBytes                         if P V is in 8 bits
//
// key_tiles.hpp defines the position of a head's tiles; packed sequences have slots. Copies of a
// tile may read beyond a row of k8 or v8, up to the number of columns of the kernel.
#pragma once

#include <type_traits>

#include "quantized/key_tiles.hpp"

namespace cutlass_attn {

// Column, of 16, at place p in k8. A word of the A operand of mma.m16n8k32 holds places 4 t .. 4 t
// + 3 of lane t of a quad. ldmatrix for m16n8k16 loads columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of
// Q into that lane. The order in which columns are summed does not matter, if it is equal for Q and
// K.
CA_HOST_DEVICE constexpr int permuted_column(int p) { return p / 4 * 2 + p % 2 + p % 4 / 2 * 8; }

// Row, of the eight rows of 16 keys, that holds a pair. A word of P holds keys 2 t, 2 t + 1, 2 t +
// 8 and 2 t + 9, which are pairs t and t + 4. ldmatrix.trans loads rows 2 t and 2 t + 1 of V into
// lane t together.
CA_HOST_DEVICE constexpr int pair_row(int pair) { return pair % 4 * 2 + pair / 4; }

template <class TileScales_, class KeyTiles_ = DenseKeyTiles>
struct BasicQuantizedParams : KeyTiles_::Params {
  using TileScales = TileScales_;
  using KeyTiles = KeyTiles_;
  using Head = typename KeyTiles::Head;
  using Base = typename KeyTiles::Params;
  using Base::problem;
  static constexpr bool kHasValues = !std::is_same_v<TileScales, quantize::KeyScales>;
  static constexpr bool kTransposesV = false;  // whether v8 has keys next to each other
  static constexpr int kPrePostThreads = 128;
  static constexpr int kPrePostSmemBytes = (quantize::kPartialSums + 1) * 256 * 4;

  // The call's operands. K and V of `problem` are k8 and v8, with two int8 per element.
  Operand source_k, source_v;
  TileScales* scales;
  float* shift;
  int32_t columns;  // of k8
  KeyTiles key_tiles;

  static BasicQuantizedParams prepare(Problem const& p, Workspace const& workspace,
                                      DeviceLimits const& device, KernelFacts const& facts) {
    BasicQuantizedParams params(Base::prepare(p, workspace, device, facts));
    params.source_k = p.k;
    params.source_v = p.v;
    params.columns = columns_of(p);
    params.key_tiles = KeyTiles(p, device);
    char* next = static_cast<char*>(workspace.data);
    params.problem.k = params.place(next, p.k, quantize::kTileKeys, params.columns / 2);
    if constexpr (kHasValues) {
      params.problem.v = params.place(next, p.v, quantize::kTileKeys / 2, p.head_dim_v);
    }
    params.scales = reinterpret_cast<TileScales*>(next);
    params.shift = reinterpret_cast<float*>(params.scales + KeyTiles::tiles_of(p));
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const&, KernelFacts const&) {
    int64_t const columns = columns_of(p);
    int64_t const bytes = columns + (kHasValues ? p.head_dim_v : 0);  // per key
    int64_t const of_tile = quantize::kTileKeys * bytes + int64_t(sizeof(TileScales));
    int64_t const behind = kHasValues ? quantize::kReadableBytes : 0;
    return KeyTiles::tiles_of(p) * of_tile + KeyTiles::heads_of(p) * columns * 4 + behind;
  }

  // Blocks that round V, if any, follow those that round K.
  Launch launch_before(KernelFacts const&) const {
    int64_t const blocks = int64_t(key_tiles.heads) * key_tiles.head_blocks;
    return {blocks * (kHasValues ? 2 : 1), 1, kPrePostThreads, kPrePostSmemBytes};
  }
  Launch launch_after(KernelFacts const&) const { return {}; }

  // In a kernel: tiles of block `block` among those that round K, or V.
  template <class Arch>
  CA_HOST_DEVICE QuantizedTiles<Head> tiles_of_block(int32_t block) const {
    return key_tiles.template of_block<Arch>(problem, block);
  }
  // Head of the workspace for a KV head of a batch entry.
  template <class SeqInfo>
  CA_HOST_DEVICE Head head_of(SeqInfo const& seq, int32_t head_kv) const {
    return key_tiles.head_of(problem, seq, head_kv);
  }
  CA_HOST_DEVICE TileScales* scales_of(Head const& head, int32_t tile) const {
    return scales + key_tiles.number(head, tile);
  }
  CA_HOST_DEVICE float* shift_of(Head const& head) const {
    return shift + key_tiles.number(problem, head) * columns;
  }

 private:
  explicit BasicQuantizedParams(Base const& params) : Base(params) {}

  // Places an operand with `rows` rows per tile and two-byte elements at `next`; advances `next`.
  Operand place(char*& next, Operand const& from, int64_t rows, int64_t row_elements) const {
    int64_t const of_tile = rows * row_elements;
    Operand const placed = key_tiles.placed(problem, next, from.dtype, of_tile, row_elements);
    next += KeyTiles::tiles_of(problem) * of_tile * 2;
    return placed;
  }

  static int32_t columns_of(Problem const& p) { return (p.head_dim + 31) / 32 * 32; }
};

using QuantizedParams = BasicQuantizedParams<quantize::KeyScales>;
using QuantizedValuesParams = BasicQuantizedParams<quantize::KeyValueScales>;
using Fp8ValuesParams = BasicQuantizedParams<quantize::KeyFp8Scales>;
using QuantizedVarlenParams = BasicQuantizedParams<quantize::KeyScales, VarlenKeyTiles>;
using QuantizedValuesVarlenParams = BasicQuantizedParams<quantize::KeyValueScales, VarlenKeyTiles>;
using Fp8ValuesVarlenParams = BasicQuantizedParams<quantize::KeyFp8Scales, VarlenKeyTiles>;

}  // namespace cutlass_attn
