// Launch parameters of forward kernels for sequences of different lengths, which only the device
// knows.
#pragma once

#include "core/forward_params.hpp"
#include "core/packed_tiles.hpp"

namespace cutlass_attn {

struct VarlenParams {
  using Tile = BasicTileCoord<VarlenSeqInfo>;

  Problem problem;
  int32_t heads;   // query heads that share a tile, as in TileScheduler
  int32_t slots;   // slots of all batch entries, per head group
  int64_t blocks;  // of the grid: the slots of all head groups
  FastDivisor by_slots, by_slots_each, by_heads, by_heads_per_kv;
  FastDivisor by_chunk;
  // Divides by the page size; without pages by a number that makes every page index 0
  FastDivisor by_page;

  // On the host. Works for any kernel with these facts, also one compiled by NVRTC.
  static VarlenParams prepare(Problem const& p, Workspace const&, DeviceLimits const&,
                              KernelFacts const& facts) {
    VarlenParams params;
    params.problem = p;
    bool const is_packed = p.seq_q.cu_seqlens != nullptr;
    int64_t const rows = p.seq_q.rows();
    Problem average = p;
    if (is_packed && p.batch > 0) average.seq_q.seqlen = int32_t((rows + p.batch - 1) / p.batch);
    params.heads = facts.packs_heads ? TileScheduler::heads_of_tile(average, facts.block_m) : 1;
    int64_t const each = (rows * params.heads + facts.block_m - 1) / facts.block_m;
    int64_t const slots =
        is_packed ? PackedTiles::slots(rows, params.heads, facts.block_m, p.batch) : each * p.batch;
    params.slots = at_least_1(slots);
    params.blocks = rows > 0 ? slots * (p.num_heads_q / params.heads) : 0;
    params.by_slots = FastDivisor(params.slots);
    params.by_slots_each = FastDivisor(at_least_1(each));
    params.by_heads = FastDivisor(params.heads);
    params.by_heads_per_kv = FastDivisor(at_least_1(p.num_heads_q / at_least_1(p.num_heads_kv)));
    params.by_chunk = IntervalMask::divisor_of(p.mask);
    params.by_page = FastDivisor(p.kv.block_table ? at_least_1(p.kv.page_size) : kMaxSeqlen);
    return params;
  }
  static int64_t workspace_bytes(Problem const&, DeviceLimits const&, KernelFacts const&) {
    return 0;
  }
  Launch launch(KernelFacts const& facts) const {
    return {blocks, 1, facts.threads, facts.smem_bytes};
  }

  // In a kernel. kHasChunks: whether the kernel runs calls with attention chunks.
  template <bool kHasChunks>
  CA_HOST_DEVICE IntervalMask mask(SeqLens const& seqlens) const {
    return IntervalMask(problem.mask, seqlens, by_chunk, kHasChunks);
  }

  // This block's tile; it may have no rows. As in TileScheduler, neighbours share K and V, and the
  // last queries come first.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE Tile tile() const {
    return tile_of<kBlockM, Arch>(Arch::block());
  }
  // The tile of any block of the grid. All lanes of a warp call together.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE Tile tile_of(int block) const {
    int const group = by_slots(block);
    int const slot = slots - 1 - (block - group * slots);
    int const batch = problem.seq_q.cu_seqlens
                          ? packed<kBlockM>().template entry_of<Arch>(slot, problem.batch)
                          : by_slots_each(slot);
    int const head_q = group * heads;
    return Tile(problem, VarlenSeqInfo(problem, batch), heads, by_heads, head_q,
                by_heads_per_kv(head_q), slot - first_slot<kBlockM>(batch), kBlockM);
  }

 private:
  template <int kBlockM>
  CA_HOST_DEVICE PackedTiles packed() const {
    return {problem.seq_q.cu_seqlens, heads, kBlockM};
  }

  // First slot of a batch entry.
  template <int kBlockM>
  CA_HOST_DEVICE int first_slot(int batch) const {
    Sequences const& s = problem.seq_q;
    if (s.cu_seqlens) return packed<kBlockM>().first_slot(batch);
    return batch * ((s.seqlen * heads + kBlockM - 1) / kBlockM);
  }
};

}  // namespace cutlass_attn
