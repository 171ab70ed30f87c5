// What the mma.sync forward kernel with Q K^T in int8 is launched with, and its workspace:
//
//   k8       (head, key, columns) int8     K as core/quantize.hpp rounds it: a head is a KV head of
//                                          a batch entry, keys are rounded up to 64, columns to 32,
//                                          with zeros. Within 16 columns they are in the order of
//                                          permuted_column()
//   scales   (head, tile, 4) fp32          of the groups of a tile of 64 keys
//   shift    (head, columns) fp32          what was subtracted from K
#pragma once

#include "core/divide.hpp"
#include "core/forward_params.hpp"
#include "core/quantize.hpp"

namespace cutlass_attn::sm80 {

// Which of 16 columns is at place p of them in k8. A word of the A operand of mma.m16n8k32 is four
// places, 4 t + e of lane t of a quad; what ldmatrix brings of Q, for m16n8k16, are the columns 2
// t, 2 t + 1 and those 8 on. A product does not care in which order it adds up, as long as Q and K
// have the same.
CA_HOST_DEVICE constexpr int permuted_column(int p) { return p / 4 * 2 + p % 2 + p % 4 / 2 * 8; }

struct QuantizedParams : ForwardParams {
  static constexpr int kAsideThreads = 128;
  static constexpr int kAsideSmemBytes = (quantize::kPartialSums + 1) * 256 * 4;

  Operand source_k;  // as the call has it; that of `problem` is k8, two int8 being an element
  float* scales;
  float* shift;
  int32_t columns;  // of k8
  int32_t tiles;    // of 64 keys, of a head
  int32_t heads;
  FastDivisor by_tiles, by_heads_kv;

  static QuantizedParams prepare(Problem const& p, Workspace const& workspace,
                                 DeviceLimits const& device, KernelFacts const& facts) {
    QuantizedParams params(ForwardParams::prepare(p, workspace, device, facts));
    params.source_k = p.k;
    params.columns = columns_of(p);
    params.tiles = tiles_of(p);
    params.heads = p.batch * p.num_heads_kv;
    params.by_tiles = FastDivisor(params.tiles > 0 ? params.tiles : 1);
    params.by_heads_kv = FastDivisor(p.num_heads_kv > 0 ? p.num_heads_kv : 1);
    int64_t const tiles = int64_t(params.heads) * params.tiles;
    int64_t const elements = int64_t(quantize::kTileKeys) * params.columns / 2;  // of a tile
    params.problem.k = {workspace.data, p.num_heads_kv * params.tiles * elements,
                        params.tiles * elements, params.columns / 2, p.k.dtype};
    params.scales =
        reinterpret_cast<float*>(static_cast<char*>(workspace.data) + tiles * elements * 2);
    params.shift = params.scales + tiles * quantize::kGroups;
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const&, KernelFacts const&) {
    int64_t const heads = int64_t(p.batch) * p.num_heads_kv, columns = columns_of(p);
    int64_t const of_tile = quantize::kTileKeys * columns + quantize::kGroups * 4;
    return heads * (tiles_of(p) * of_tile + columns * 4);
  }

  // One tile of keys a block.
  Launch launch_before(KernelFacts const&) const {
    return {int64_t(heads) * tiles, 1, kAsideThreads, kAsideSmemBytes};
  }
  Launch launch_after(KernelFacts const&) const { return {}; }

  // In a kernel: of the KV head of a batch entry.
  CA_HOST_DEVICE int32_t head_of(int32_t batch, int32_t head_kv) const {
    return batch * problem.num_heads_kv + head_kv;
  }
  CA_HOST_DEVICE float* scales_of(int32_t head, int32_t tile) const {
    return scales + (int64_t(head) * tiles + tile) * quantize::kGroups;
  }
  CA_HOST_DEVICE float* shift_of(int32_t head) const { return shift + int64_t(head) * columns; }

 private:
  explicit QuantizedParams(ForwardParams const& params) : ForwardParams(params) {}

  static int32_t columns_of(Problem const& p) { return (p.head_dim + 31) / 32 * 32; }
  static int32_t tiles_of(Problem const& p) {
    return (p.seq_k.seqlen + quantize::kTileKeys - 1) / quantize::kTileKeys;
  }
};

}  // namespace cutlass_attn::sm80
