// Launch parameters of the kernels for latent attention, and of the launch that merges splits.
#pragma once

#include "core/key_splits.hpp"
#include "core/varlen_params.hpp"

namespace cutlass_attn {

// Chooses the number of splits with the least modelled time: of the waves of all splits of all
// tiles, and of the launch that merges them. The constants, in ns, are fitted to an H200
// (docs/latent.md).
struct LatentSplits {
  static constexpr int kMaxHeadDim = 512;
  static constexpr int kMinKeys = 64;            // fewest keys of a split: two tiles
  static constexpr int kBlockBytes = 100 << 10;  // most shared memory of a block
  static constexpr int64_t kStart = 1000;        // of a block: launch, Q, first tile
  static constexpr int64_t kMerge = 2500;        // of up to 64 splits, which are read at once
  static constexpr int64_t kResult = 18;         // of 16 rows of a split

  static int32_t splits(Problem const& p, int64_t tiles, DeviceLimits const& device,
                        KernelFacts const& facts) {
    if (tiles < 1 || device.num_sms < 1) return 1;
    // A block of more than 16 rows takes all registers of an SM.
    bool const has_room = device.smem_per_sm >= 2 * kBlockBytes && facts.block_m == 16;
    int64_t const blocks = int64_t(device.num_sms) * (has_room ? 2 : 1);
    int64_t const keys = max_keys(p, p.seq_q.seqlen);
    int64_t most = keys / kMinKeys;
    if (most > KeySplits::kMax) most = KeySplits::kMax;
    auto const cost = [&](int64_t n) {
      int64_t const waves = (tiles * n + blocks - 1) / blocks;
      int64_t own = keys * key_time(facts) / n;
      // Two blocks on one SM take 1.5 times as long per key.
      if (tiles * n > device.num_sms && has_room) own = own * 3 / 2;
      int64_t const results = n * tiles * row_blocks(p, facts.block_m);
      return waves * (own + kStart) + (n == 1 ? 0 : (n + 63) / 64 * kMerge + results * kResult);
    };
    int64_t best = 1, least = cost(1);
    auto const consider = [&](int64_t n) {
      if (n < 2 || n > most) return;
      int64_t const its = cost(n);
      if (its < least) best = n, least = its;
    };
    // Beyond eight splits, only some numbers, and those that fill whole waves, are considered.
    for (int64_t n = 2; n <= 8; ++n) consider(n);
    for (int64_t n = 8; n <= most; n *= 2) consider(n * 3 / 2), consider(n * 2);
    consider(device.num_sms / tiles);
    for (int64_t waves = 1; waves <= 3; ++waves) consider(waves * blocks / tiles);
    consider(most);
    return int32_t(best);
  }

  // Most rows of a tile, in blocks of 16.
  static int32_t row_blocks(Problem const& scheduled, int32_t block_m) {
    Sequences const& q = scheduled.seq_q;
    int64_t const all = int64_t(q.seqlen) * TileScheduler::heads_of_tile(scheduled, block_m);
    return at_least_1(((q.cu_seqlens || all > block_m ? block_m : all) + 15) / 16);
  }

  // The launch that merges splits (latent/merge.hpp). A job is 16 rows of a tile; the columns are
  // divided over its blocks. Warps read up to eight splits at once.
  struct Merge {
    static constexpr int32_t kThreads = 256, kRows = 16, kColumns = 16, kAtOnce = 8;
    static constexpr int32_t kBytes = 25 << 10;  // most shared memory of a block

    int32_t row_blocks;  // of a tile
    FastDivisor by_row_blocks;
    int32_t log2_shares;  // warps that share the splits
    int32_t log2_items;   // times kColumns that a warp merges
    int32_t log2_groups;  // blocks of a job

    // With a fixed split size, sums must not depend on the number of splits.
    Merge(int32_t row_blocks, int32_t count, bool is_fixed)
        : row_blocks(row_blocks), by_row_blocks(row_blocks) {
      constexpr int32_t kWarps = kThreads / 32;
      log2_shares = log2_items = log2_groups = 0;
      while (1 << log2_shares < kWarps && (is_fixed || kAtOnce << log2_shares < count)) {
        ++log2_shares;
      }
      while (!is_fixed && count << (log2_items + 1) <= kAtOnce) ++log2_items;
      int32_t const columns = (kWarps * kColumns << log2_items) >> log2_shares;  // of a block
      while (columns << log2_groups < kMaxHeadDim) ++log2_groups;
    }
  };

 private:
  // A key, in a block that is alone on its SM.
  static int64_t key_time(KernelFacts const& facts) {
    if (facts.block_m == 16) return 54;
    return facts.block_n >= 32 ? 30 : 95;  // wgmma; mma.sync, as tiles of 16 keys
  }
};

struct LatentParams : VarlenParams {
  KeySplits splits;
  FastDivisor by_queries;  // divides by the number of queries of a batch entry
  int32_t cluster;         // blocks of a cluster, 1 or 2, which go through the same keys
  LatentSplits::Merge merge;

  // Called on the host.
  LatentParams(Problem const& p, Workspace const& workspace, DeviceLimits const& device,
               KernelFacts const& facts)
      : VarlenParams(VarlenParams::prepare(as_scheduled(p), workspace, device, facts)),
        splits(size_of(as_scheduled(p), blocks, device, facts), workspace),
        by_queries(p.seq_q.seqlen > 0 ? p.seq_q.seqlen : 1),
        cluster(cluster_of(as_scheduled(p), heads, facts)),
        merge(LatentSplits::row_blocks(as_scheduled(p), facts.block_m), splits.count,
              p.split_size > 0) {
    problem = p;
    if (p.kv.indices) by_page = FastDivisor(p.kv.page_size);
  }
  static LatentParams prepare(Problem const& p, Workspace const& workspace,
                              DeviceLimits const& device, KernelFacts const& facts) {
    return LatentParams(p, workspace, device, facts);
  }
  static int64_t workspace_bytes(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    return size_of(p, device, facts).bytes();
  }
  static int32_t num_splits(Problem const& p, DeviceLimits const& device,
                            KernelFacts const& facts) {
    return size_of(p, device, facts).count;
  }
  Launch launch(KernelFacts const& facts) const {
    Launch launch = splits.launch(blocks, facts);
    launch.cluster = cluster;
    return launch;
  }
  Launch launch_before(KernelFacts const&) const { return {}; }
  Launch launch_after(KernelFacts const&) const {
    if (splits.count == 1) return {};
    int64_t const of_merge = blocks * merge.row_blocks << merge.log2_groups;
    return {of_merge, 1, LatentSplits::Merge::kThreads, LatentSplits::Merge::kBytes};
  }

  // In a kernel with clusters: the tile of rows and the split of a block of the grid, and its rank
  // in its cluster. The blocks of a cluster have neighbouring tiles, and equal splits.
  CA_HOST_DEVICE int unit(int block) const {
    return (splits.unit(block >> (cluster - 1)) << (cluster - 1)) + rank(block);
  }
  CA_HOST_DEVICE int split(int block) const { return splits.split(block >> (cluster - 1)); }
  CA_HOST_DEVICE int rank(int block) const { return block & (cluster - 1); }

  // The tile of a block, with the queries of all tiles of its cluster, whose keys it goes through.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE Tile rows_of_cluster(Tile tile) const {
    if (cluster == 1) return tile;
    Tile const other = tile_of<kBlockM, Arch>(unit(Arch::block()) ^ 1);
    if (other.q_begin < tile.q_begin) tile.q_begin = other.q_begin;
    if (other.q_end > tile.q_end) tile.q_end = other.q_end;
    return tile;
  }

  // In a kernel: the tile with this number, which may have no rows. Called by all lanes of a warp.
  template <int kBlockM, class Arch>
  CA_HOST_DEVICE Tile tile_of(int unit) const {
    if (problem.kv.indices == nullptr) return VarlenParams::tile_of<kBlockM, Arch>(unit);
    int const each = (heads + kBlockM - 1) / kBlockM;  // tiles of a query
    int const row = by_slots_each(unit);               // of all queries
    int const batch = by_queries(row), query = row - batch * problem.seq_q.seqlen;
    Tile tile(problem, VarlenSeqInfo(problem, batch), heads, by_heads, 0, 0, 0, kBlockM);
    int const first = (unit - row * each) * kBlockM;  // head
    tile.row_begin = query * heads + first;
    tile.rows = heads - first < kBlockM ? heads - first : kBlockM;
    tile.q_begin = query;
    tile.q_end = query + 1;
    return tile;
  }

 private:
  // With lists, every query has its own keys. So a tile has rows of one query only, and each query
  // is scheduled like a batch entry.
  static Problem as_scheduled(Problem const& p) {
    Problem scheduled = p;
    if (p.kv.indices) {
      scheduled.batch *= p.seq_q.seqlen;
      scheduled.seq_q.seqlen = 1;
    }
    // The host knows only the average length of packed sequences.
    if (p.seq_q.cu_seqlens && p.batch > 0) {
      scheduled.seq_q.seqlen = (p.seq_q.total + p.batch - 1) / p.batch;
      if (p.seq_k.cu_seqlens) scheduled.seq_k.seqlen = (p.seq_k.total + p.batch - 1) / p.batch;
    }
    return scheduled;
  }

  // Two if the tiles of rows 2i and 2i + 1 belong to one batch entry and go through equal keys, but
  // for some tiles at the end, whatever lengths the device reads. Lengths of the queries that only
  // the device knows exclude that.
  static int32_t cluster_of(Problem const& scheduled, int32_t heads, KernelFacts const& facts) {
    Sequences const& q = scheduled.seq_q;
    Mask const& mask = scheduled.mask;
    if (facts.cluster < 2 || q.cu_seqlens || q.is_padded()) return 1;
    int64_t const tiles = (int64_t(q.seqlen) * heads + facts.block_m - 1) / facts.block_m;
    bool const slides = mask.window_left != kUnbounded || mask.attention_chunk > 0;
    bool const are_of_one_query = q.seqlen == 1 || heads % (2 * facts.block_m) == 0;
    return tiles % 2 == 0 && (are_of_one_query || !slides) ? 2 : 1;
  }

  // Equal to `blocks`, but computed without divisors, because dispatch calls this in every call.
  static int64_t tiles_of(Problem const& scheduled, int block_m) {
    Problem const& p = scheduled;
    int32_t const heads = TileScheduler::heads_of_tile(p, block_m);
    int64_t const rows = p.seq_q.rows(), each = (rows * heads + block_m - 1) / block_m;
    int64_t const slots =
        p.seq_q.cu_seqlens ? PackedTiles::slots(rows, heads, block_m, p.batch) : each * p.batch;
    return rows > 0 ? slots * (p.num_heads_q / heads) : 0;
  }
  static KeySplits::Size size_of(Problem const& p, DeviceLimits const& device,
                                 KernelFacts const& facts) {
    Problem const scheduled = as_scheduled(p);
    return size_of(scheduled, tiles_of(scheduled, facts.block_m), device, facts);
  }
  // A split_size is rounded up to whole tiles.
  static KeySplits::Size size_of(Problem const& scheduled, int64_t tiles,
                                 DeviceLimits const& device, KernelFacts const& facts) {
    Problem rounded = scheduled;
    if (int32_t const each = facts.block_n; each > 0 && scheduled.split_size > 0) {
      rounded.split_size = (scheduled.split_size + each - 1) / each * each;
    }
    KeySplits::Size size =
        size_of_splits<LatentSplits>(rounded, tiles, device, facts, facts.block_n);
    size.has_counters = false;
    return size;
  }
};

}  // namespace cutlass_attn
