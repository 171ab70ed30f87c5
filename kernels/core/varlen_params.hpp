// What the forward kernels are launched with where sequences have lengths of their own, which only
// the device knows.
#pragma once

#include "core/forward_params.hpp"
#include "core/packed_tiles.hpp"

namespace cutlass_attn {

struct VarlenParams {
  using Tile = BasicTileCoord<VarlenSeqInfo>;

  Problem problem;
  int32_t heads;   // query heads that share a tile, as in TileScheduler
  int32_t slots;   // for tiles, of all batch entries together
  int64_t blocks;  // in the grid: the slots of every group of heads
  FastDivisor by_slots, by_slots_each, by_heads, by_heads_per_kv;
  FastDivisor by_chunk;
  FastDivisor by_page;  // keys of a page; without pages by so many that all are in the first

  // On the host, for any kernel with these facts, whoever compiled it.
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

  // In a kernel. kHasChunks: whether it is given calls with attention chunks.
  template <bool kHasChunks>
  CA_HOST_DEVICE IntervalMask mask(SeqLens const& seqlens) const {
    return IntervalMask(problem.mask, seqlens, by_chunk, kHasChunks);
  }

  // The tile of this block, perhaps one without rows. As with TileScheduler neighbours share K and
  // V, and the last queries come first.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE Tile tile() const {
    return tile_of<kBlockM, Arch>(Arch::block());
  }
  // The same of any block of the grid; all lanes of a warp ask together.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE Tile tile_of(int block) const {
    int const group = by_slots(block);
    int const slot = slots - 1 - (block - group * slots);
    int const batch = problem.seq_q.cu_seqlens
                          ? packed<kBlockM>().template entry_or_first<Arch>(slot, problem.batch)
                          : by_slots_each(slot);
    int const head_q = group * heads;
    return Tile(problem, VarlenSeqInfo(problem, batch), heads, by_heads, head_q,
                by_heads_per_kv(head_q), slot - first_slot<kBlockM>(batch), kBlockM);
  }

 private:
  static int32_t at_least_1(int64_t x) { return x < 1 ? 1 : int32_t(x); }

  template <int kBlockM>
  CA_HOST_DEVICE PackedTiles packed() const {
    return {problem.seq_q.cu_seqlens, heads, kBlockM};
  }

  // The first slot of a batch entry.
  template <int kBlockM>
  CA_HOST_DEVICE int first_slot(int batch) const {
    Sequences const& s = problem.seq_q;
    if (s.cu_seqlens) return packed<kBlockM>().first_slot(batch);
    return batch * ((s.seqlen * heads + kBlockM - 1) / kBlockM);
  }
};

}  // namespace cutlass_attn
