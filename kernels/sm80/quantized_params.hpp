// What the mma.sync forward kernel with Q K^T in int8 is launched with, and its workspace:
//
//   k8       (head, key, columns) int8     K as core/quantize.hpp rounds it: a head is a KV head of
//                                          a batch entry, keys are rounded up to 64, columns to 32,
//                                          with zeros. Within 16 columns they are in the order of
//                                          permuted_column()
//   v8       (head, pair, columns, 2)      with P V in 8 bits, V: the two keys of a pair are next
//   to
//                                          each other. Within 16 keys, pairs are in the order of
//                                          pair_row()
//   scales   (head, tile) TileScales       of a tile of 64 keys
//   shift    (head, columns) fp32          what was subtracted from K
#pragma once

#include <type_traits>

#include "core/divide.hpp"
#include "core/forward_params.hpp"
#include "core/quantize.hpp"

namespace cutlass_attn::sm80 {

// Which of 16 columns is at place p of them in k8. A word of the A operand of mma.m16n8k32 is four
// places, 4 t + e of lane t of a quad; what ldmatrix brings of Q, for m16n8k16, are the columns 2
// t, 2 t + 1 and those 8 on. A product does not care in which order it adds up, as long as Q and K
// have the same.
CA_HOST_DEVICE constexpr int permuted_column(int p) { return p / 4 * 2 + p % 2 + p % 4 / 2 * 8; }

// In which row of the eight of 16 keys a pair of them is, of P V the same: a word of P is of the
// keys 2 t, 2 t + 1 and those 8 on, the pairs t and t + 4; ldmatrix.trans brings lane t of V the
// rows 2 t and 2 t + 1 together.
CA_HOST_DEVICE constexpr int pair_row(int pair) { return pair % 4 * 2 + pair / 4; }

// What a block rounds: tiles of 64 keys from `first` on, before `end`, of one of the heads of all
// batch entries.
struct QuantizedTiles {
  int32_t head, first, end;
};

template <class TileScales_>
struct BasicQuantizedParams : ForwardParams {
  using TileScales = TileScales_;
  static constexpr bool kHasValues = !std::is_same_v<TileScales, quantize::KeyScales>;
  static constexpr int kAsideThreads = 128;
  static constexpr int kAsideSmemBytes = (quantize::kPartialSums + 1) * 256 * 4;

  // As the call has them; those of `problem` are k8 and v8, two int8 being an element.
  Operand source_k, source_v;
  TileScales* scales;
  float* shift;
  int32_t columns;  // of k8
  int32_t tiles;    // of 64 keys, of a head
  int32_t heads;
  int32_t block_tiles, head_blocks;  // of a block that rounds, and such blocks of a head
  FastDivisor by_blocks, by_heads_kv;

  static BasicQuantizedParams prepare(Problem const& p, Workspace const& workspace,
                                      DeviceLimits const& device, KernelFacts const& facts) {
    BasicQuantizedParams params(ForwardParams::prepare(p, workspace, device, facts));
    params.source_k = p.k;
    params.source_v = p.v;
    params.columns = columns_of(p);
    params.tiles = tiles_of(p);
    params.heads = p.batch * p.num_heads_kv;
    params.block_tiles = block_tiles_of(int64_t(params.heads) * params.tiles, device);
    params.head_blocks = (params.tiles + params.block_tiles - 1) / params.block_tiles;
    params.by_blocks = FastDivisor(params.head_blocks > 0 ? params.head_blocks : 1);
    params.by_heads_kv = FastDivisor(p.num_heads_kv > 0 ? p.num_heads_kv : 1);
    char* next = static_cast<char*>(workspace.data);
    params.problem.k = params.place(next, p.k, quantize::kTileKeys, params.columns / 2);
    if constexpr (kHasValues) {
      params.problem.v = params.place(next, p.v, quantize::kTileKeys / 2, p.head_dim_v);
    }
    params.scales = reinterpret_cast<TileScales*>(next);
    params.shift = reinterpret_cast<float*>(params.scales + int64_t(params.heads) * params.tiles);
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const&, KernelFacts const&) {
    int64_t const heads = int64_t(p.batch) * p.num_heads_kv, columns = columns_of(p);
    int64_t const bytes = columns + (kHasValues ? p.head_dim_v : 0);  // of a key
    int64_t const of_tile = quantize::kTileKeys * bytes + int64_t(sizeof(TileScales));
    return heads * (tiles_of(p) * of_tile + columns * 4);
  }

  // Blocks that round V, where there are, come after those that round K.
  Launch launch_before(KernelFacts const&) const {
    return {int64_t(heads) * head_blocks * (kHasValues ? 2 : 1), 1, kAsideThreads, kAsideSmemBytes};
  }
  Launch launch_after(KernelFacts const&) const { return {}; }

  // In a kernel: of block `block` of those that round K, or V.
  CA_HOST_DEVICE QuantizedTiles tiles_of_block(int32_t block) const {
    int32_t const head = by_blocks(block), first = (block - head * head_blocks) * block_tiles;
    int32_t const end = first + block_tiles;
    return {head, first, end < tiles ? end : tiles};
  }
  // Of the KV head of a batch entry.
  CA_HOST_DEVICE int32_t head_of(int32_t batch, int32_t head_kv) const {
    return batch * problem.num_heads_kv + head_kv;
  }
  CA_HOST_DEVICE TileScales* scales_of(int32_t head, int32_t tile) const {
    return scales + (int64_t(head) * tiles + tile);
  }
  CA_HOST_DEVICE float* shift_of(int32_t head) const { return shift + int64_t(head) * columns; }

 private:
  explicit BasicQuantizedParams(ForwardParams const& params) : ForwardParams(params) {}

  // An operand of so many rows a tile, and elements of two bytes a row, at `next`, which moves on.
  Operand place(char*& next, Operand const& from, int64_t rows, int64_t row_elements) const {
    int64_t const of_head = tiles * rows * row_elements;
    Operand const placed{next, problem.num_heads_kv * of_head, of_head, row_elements, from.dtype};
    next += heads * of_head * 2;
    return placed;
  }

  // Each block works out the shift of its head, and the first of its tiles is waited for: up to
  // eight tiles, as long as there are 16 blocks for an SM.
  static int32_t block_tiles_of(int64_t all_tiles, DeviceLimits const& device) {
    int64_t const blocks = 16 * int64_t(device.num_sms), each = 8;
    return int32_t(all_tiles < blocks * each ? 1 + (all_tiles - 1) / blocks : each);
  }
  static int32_t columns_of(Problem const& p) { return (p.head_dim + 31) / 32 * 32; }
  static int32_t tiles_of(Problem const& p) {
    return (p.seq_k.seqlen + quantize::kTileKeys - 1) / quantize::kTileKeys;
  }
};

using QuantizedParams = BasicQuantizedParams<quantize::KeyScales>;
using QuantizedValuesParams = BasicQuantizedParams<quantize::KeyValueScales>;
using Fp8ValuesParams = BasicQuantizedParams<quantize::KeyFp8Scales>;

}  // namespace cutlass_attn::sm80
