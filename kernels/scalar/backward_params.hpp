// Launch parameters of the scalar backward kernel, and of the launches before and after it.
#pragma once

#include "core/divide.hpp"
#include "core/launch.hpp"
#include "core/mask.hpp"
#include "core/problem.hpp"

namespace cutlass_attn::scalar {

struct BackwardParams {
  // Entries of a bias gradient: `count` per dimension, 1 if it is broadcast. An entry sums the
  // gradients of `each` logits per dimension.
  struct Entries {
    int32_t count[4], each[4];

    int64_t all() const { return int64_t(count[0]) * count[1] * count[2] * count[3]; }
  };

  Problem problem;
  Gradients grad;
  float* delta;  // workspace, in the layout of the LSE: rowsum(dO O) - dLSE
  Entries entries;
  int32_t lanes;  // lanes of a warp that share an entry of the bias: a power of 2 up to 32
  int32_t tiles_q, tiles_k;
  FastDivisor by_tiles_q, by_tiles_k, by_heads_q, by_heads_kv, by_heads_per_kv, by_lanes;
  FastDivisor by_chunk;

  // On the host. Works for any kernel with these facts, also one compiled by NVRTC. Tiles of
  // queries and of keys have an equal number of rows.
  static BackwardParams prepare(Problem const& p, Workspace const& workspace, DeviceLimits const&,
                                KernelFacts const& facts) {
    auto const tiles = [&](int32_t rows) { return (rows + facts.block_m - 1) / facts.block_m; };
    BackwardParams params;
    params.problem = p;
    params.grad = *p.grad;
    params.delta = static_cast<float*>(workspace.data);
    PerLogit const& bias = p.grad->bias;
    int32_t const sizes[] = {p.batch, p.num_heads_q, p.seq_q.seqlen, p.seq_k.seqlen};
    int64_t const strides[] = {bias.batch_stride, bias.head_stride, bias.row_stride,
                               bias.key_stride};
    int64_t logits = 1;  // per entry
    for (int d = 0; d < 4; ++d) {
      bool const is_broadcast = bias && strides[d] == 0;
      params.entries.count[d] = is_broadcast ? 1 : sizes[d];
      params.entries.each[d] = is_broadcast ? sizes[d] : 1;
      logits *= params.entries.each[d];
    }
    params.lanes = 1;
    while (params.lanes < 32 && params.lanes < logits) params.lanes *= 2;
    params.tiles_q = tiles(p.seq_q.seqlen);
    params.tiles_k = tiles(p.seq_k.seqlen);
    params.by_tiles_q = FastDivisor(at_least_1(params.tiles_q));
    params.by_tiles_k = FastDivisor(at_least_1(params.tiles_k));
    params.by_heads_q = FastDivisor(at_least_1(p.num_heads_q));
    params.by_heads_kv = FastDivisor(at_least_1(p.num_heads_kv));
    params.by_heads_per_kv = FastDivisor(at_least_1(p.num_heads_q / at_least_1(p.num_heads_kv)));
    params.by_lanes = FastDivisor(params.lanes);
    params.by_chunk = IntervalMask::divisor_of(p.mask);
    return params;
  }

  static int64_t workspace_bytes(Problem const& p, DeviceLimits const&, KernelFacts const&) {
    int64_t const rows = p.seq_q.cu_seqlens ? p.seq_q.total : int64_t(p.batch) * p.seq_q.seqlen;
    return rows * p.num_heads_q * int64_t(sizeof(float));
  }

  // One block per tile of queries of a head: delta and dQ.
  Launch launch_before(KernelFacts const& facts) const {
    return of_blocks(int64_t(problem.batch) * problem.num_heads_q * tiles_q, facts);
  }
  // One block per tile of keys of a KV head: dK and dV.
  Launch launch(KernelFacts const& facts) const {
    bool const is_wanted = grad.k.data != nullptr || grad.v.data != nullptr;
    return of_blocks(is_wanted ? int64_t(problem.batch) * problem.num_heads_kv * tiles_k : 0,
                     facts);
  }
  // One block per sink, then blocks for entries of the bias gradient.
  Launch launch_after(KernelFacts const& facts) const {
    int64_t const threads = grad.bias ? entries.all() * lanes : 0;
    return of_blocks(sinks() + (threads + facts.threads - 1) / facts.threads, facts);
  }

  CA_HOST_DEVICE int32_t sinks() const { return grad.sinks ? problem.num_heads_q : 0; }

  CA_HOST_DEVICE IntervalMask mask(SeqLens const& seqlens) const {
    return IntervalMask(problem.mask, seqlens, by_chunk, true);
  }

 private:
  static Launch of_blocks(int64_t blocks, KernelFacts const& facts) {
    return {blocks, 1, facts.threads, facts.smem_bytes};
  }
};

}  // namespace cutlass_attn::scalar
