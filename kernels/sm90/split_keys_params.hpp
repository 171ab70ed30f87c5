// Launch parameters of the wgmma kernel that splits the keys of a tile of rows over warpgroups and
// over the blocks of a cluster.
#pragma once

#include "core/forward_params.hpp"
#include "core/key_splits.hpp"
#include "sm90/params.hpp"

namespace cutlass_attn {

struct ClusterSplitsParams {
  static constexpr int kGroups = 2;  // warpgroups of a block

  TensorMap q;
  sm90::DenseRows k, v;
  ForwardParams forward;
  TileMask interval;  // counted from query 0
  int32_t blocks;     // of a cluster: a power of 2
  int32_t log2_blocks;
  char const* failure;  // why the tensor maps could not be made

  // On the host.
  static ClusterSplitsParams prepare(Problem const& p, Workspace const&, DeviceLimits const& device,
                                     KernelFacts const& facts) {
    IntervalMask const mask(p.mask, {p.seq_q.seqlen, p.seq_k.seqlen});
    ClusterSplitsParams params = {{}, {}, {}, sm90::tiles_of<ForwardParams>(p, facts),
                                  {}, 1,  0,  nullptr};
    params.interval = mask.tile_mask(0, p.seq_q.seqlen);
    int64_t const tiles = params.forward.scheduler.blocks;
    if (tiles == 0) return params;
    params.blocks = blocks_of_cluster(p, tiles, device, facts.block_m);
    while (1 << params.log2_blocks < params.blocks) ++params.log2_blocks;
    bool const is_on_gpu = device.compute_capability != 0;
    int const heads = params.forward.scheduler.heads;
    char const* const failures[] = {
        encode(sm90::queries_of(p, heads), is_on_gpu, params.q),
        params.k.prepare(p, p.k, p.head_dim, p.seq_k, p.num_heads_kv, facts.block_n, is_on_gpu),
        params.v.prepare(p, p.v, p.head_dim_v, p.seq_k, p.num_heads_kv, facts.block_n, is_on_gpu)};
    for (char const* failure : failures) {
      if (failure != nullptr) params.failure = failure;
    }
    return params;
  }
  static int64_t workspace_bytes(Problem const&, DeviceLimits const&, KernelFacts const&) {
    return 0;
  }
  static int32_t num_splits(Problem const& p, DeviceLimits const& device,
                            KernelFacts const& facts) {
    int64_t const heads = TileScheduler::heads_of_tile(p, facts.block_m);
    int64_t const tiles = TileScheduler::blocks_of(p, facts.block_m, int32_t(heads));
    return kGroups * blocks_of_cluster(p, tiles, device, facts.block_m);
  }
  Launch launch(KernelFacts const& facts) const {
    Launch launch{forward.scheduler.blocks * blocks, blocks, facts.threads, facts.smem_bytes};
    launch.failure = failure;
    return launch;
  }

  // In a kernel: the tile of rows of this block, and the block's rank in the cluster.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE TileCoord tile() const {
    return forward.template tile_of<kBlockM, Arch>(Arch::block() >> log2_blocks);
  }
  template <class Arch>
  CA_HOST_DEVICE int rank() const {
    return Arch::block() & (blocks - 1);
  }

 private:
  // Number of blocks with the least modelled time. The model was fitted on an H200
  // (docs/notes/hopper.md); its unit is a block's time for 256 keys. A cluster begins and merges
  // later than a single block.
  static int32_t blocks_of_cluster(Problem const& p, int64_t tiles, DeviceLimits const& device,
                                   int block_m) {
    constexpr int64_t kKeys = 128 * kGroups;
    // Fewer large clusters run at once than the number of SMs allows: an H200 has no room for 32
    // clusters of four blocks. If each tile has a K and V of its own, wider heads reach the memory
    // limit earlier.
    constexpr struct {
      int32_t blocks;
      int64_t sms;  // needed per tile
      double merge;
    } clusters[] = {{1, 0, 0.0}, {2, 2, 1.2}, {4, 6, 2.3}, {8, 10, 3.7}};
    bool const shares_keys = tiles > int64_t(p.batch) * p.num_heads_kv;
    int64_t const halves = p.head_dim > 64 && !shares_keys ? 3 : 2;  // of these
    int64_t const keys = max_keys(p, p.seq_q.seqlen < block_m ? p.seq_q.seqlen : block_m);
    int32_t best = 1;
    double least = 0;
    for (auto const& cluster : clusters) {
      if (p.num_splits > 0) {
        if (cluster.blocks <= p.num_splits) best = cluster.blocks;
        continue;
      }
      int64_t const together = kKeys * cluster.blocks;
      double const cost = double((keys + together - 1) / together) + cluster.merge;
      bool const has_room = cluster.sms * halves * tiles <= 2 * device.num_sms;
      if (cluster.blocks == 1 || (has_room && cost < least)) best = cluster.blocks, least = cost;
    }
    return best;
  }
};

}  // namespace cutlass_attn
