// Assignment of tiles and heads to blocks.
#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "core/scheduler.hpp"
#include "runtime/tile_cost.hpp"
#include "sm80/decode_params.hpp"

using namespace cutlass_attn;

namespace {

constexpr int kBlockM = 64;

Problem problem(int batch, int heads_q, int heads_kv, int seqlen, bool causal) {
  Problem p;
  p.set_dtype(DType::kFloat16);
  p.batch = batch, p.num_heads_q = heads_q, p.num_heads_kv = heads_kv;
  p.head_dim = p.head_dim_v = 128;
  p.seq_q.seqlen = p.seq_k.seqlen = seqlen;
  p.mask.causal = causal;
  return p;
}

std::vector<TileCoord> coords(Problem const& p, TileScheduler const& scheduler) {
  std::vector<TileCoord> all;
  for (int block = 0; block < int(scheduler.blocks); ++block) {
    all.emplace_back(p, scheduler, kBlockM, block);
  }
  return all;
}

// Heads with 4 MB of K and V: eight are the tail.
Problem long_rows(int heads_q, int heads_kv, bool causal) {
  return problem(2, heads_q, heads_kv, 8192, causal);
}

}  // namespace

TEST(every_tile_has_a_block) {
  for (Problem const& p :
       {long_rows(3, 3, true), long_rows(3, 3, false), long_rows(5, 5, true),
        long_rows(40, 10, true), long_rows(1, 1, true), problem(3, 8, 2, 100, true),
        problem(3, 8, 2, 17, true), problem(1, 1, 1, 1, true), problem(7, 3, 1, 64, false)}) {
    TileScheduler const scheduler(p, kBlockM, true);
    std::set<std::tuple<int, int, int>> seen;
    for (TileCoord const& at : coords(p, scheduler)) {
      CHECK(at.rows > 0);
      CHECK_EQ(at.head_kv, at.head_q / (p.num_heads_q / p.num_heads_kv));
      CHECK(at.seq.batch < p.batch && at.head_q < p.num_heads_q);
      seen.insert({at.seq.batch, at.head_q, at.row_begin});
    }
    CHECK_EQ(int64_t(seen.size()), scheduler.blocks);
  }
}

TEST(the_longest_of_the_last_heads_come_first) {
  Problem const p = long_rows(5, 5, true);  // ten heads
  TileScheduler const scheduler(p, kBlockM, true);
  CHECK_EQ(scheduler.order.tail, 8);
  int const tiles = scheduler.rows.tiles;
  std::vector<TileCoord> const all = coords(p, scheduler);
  for (int block = 0; block < int(all.size()); ++block) {
    int const at = block - 2 * tiles;
    int const turn = at < 0 ? block % tiles : at / 8, head = at < 0 ? block / tiles : 2 + at % 8;
    CHECK_EQ(all[block].row_begin, (tiles - 1 - turn) * kBlockM);
    CHECK_EQ(all[block].seq.batch * 5 + all[block].head_q, head);
  }
}

TEST(the_tail_counts_kv_heads) {
  CHECK_EQ(TileScheduler(long_rows(80, 10, true), kBlockM, true).order.tail, 8 * 8);
  Problem p = long_rows(3, 3, true);
  CHECK_EQ(TileScheduler(p, kBlockM, true).order.tail, 6);  // there are no more heads
  p.mask.causal = false, p.mask.window_right = 0;           // an equivalent mask
  CHECK_EQ(TileScheduler(p, kBlockM, true).order.tail, 6);
}

TEST(tiles_of_like_work_are_taken_a_head_at_a_time) {
  Problem window = long_rows(3, 3, true), chunks = window, left = long_rows(3, 3, false);
  window.mask.window_left = 1024;
  chunks.mask.attention_chunk = 1024;
  left.mask.window_left = 0;
  for (Problem const& p : {long_rows(3, 3, false), window, chunks, left}) {
    CHECK_EQ(TileScheduler(p, kBlockM, true).order.tail, 0);
  }
}

TEST(rows_that_do_not_fill_their_tiles_lack_from_the_first) {
  struct Case {
    int rows, block_m;
    std::vector<int> begins;
  };
  for (Case const& c :
       {Case{1024, 192, {0, 64, 256, 448, 640, 832}}, Case{1000, 192, {0, 64, 256, 448, 640, 832}},
        Case{1024, 128, {0, 128, 256, 384, 512, 640, 768, 896}}, Case{190, 128, {0, 64}},
        Case{130, 128, {0, 64}}, Case{200, 64, {0, 64, 128, 192}}, Case{1, 192, {0}},
        Case{17, 16, {0, 16}}, Case{0, 128, {0}}}) {
    TileRows const rows(c.rows, c.block_m);
    CHECK_EQ(rows.tiles, int(c.begins.size()));
    for (int i = 0; i < rows.tiles; ++i) {
      CHECK_EQ(std::max(rows.begin(i, c.block_m), 0), c.begins[i]);
    }
    CHECK(rows.begin(0, c.block_m) <= 0 && rows.begin(0, c.block_m) >= -c.block_m);
    // A tile that does not exist begins beyond the last row.
    CHECK(rows.begin(rows.tiles, c.block_m) >= c.rows);
  }
}

TEST(extremes_are_in_range) {
  Problem p = problem(1 << 20, 1 << 10, 1, 1, true);
  p.head_dim = p.head_dim_v = 1;
  TileScheduler const many(p, kBlockM, false);
  CHECK_EQ(many.blocks, 1 << 30);
  CHECK_EQ(many.order.tail, 32 << 20);
  TileScheduler const none(problem(0, 0, 0, 0, true), kBlockM, true);
  CHECK_EQ(none.blocks, 0);
  TileScheduler const huge(problem(1, 1, 1, 1 << 30, true), kBlockM, true);
  CHECK_EQ(huge.order.tail, 1);
}

TEST(the_fewest_splits_that_fill_the_sms_as_evenly_as_95_percent_of_the_best) {
  Problem p = problem(1, 1, 1, 1, true);
  for (int const sms : {1, 58, 128, 132}) {
    for (int const keys : {0, 100, 1024, 8192, 32768, 100000}) {
      int const most = std::min(keys / 128, 256);
      p.seq_k.seqlen = keys;
      for (int tiles = 1; tiles < 300; ++tiles) {
        auto const waves = [&](int64_t n) { return (n * tiles + sms - 1) / sms; };
        int64_t best = 1, least = 1;
        for (int n = 2; n <= most; ++n) best = n * waves(best) > best * waves(n) ? n : best;
        while (100 * least * waves(best) < 95 * best * waves(least)) ++least;
        CHECK_EQ(DecodeSplits::splits(p, tiles, {0, sms}, {}), int(least));
      }
    }
  }
}

TEST(with_small_pages_an_sm_has_two_splits_if_it_has_room) {
  Problem p = problem(16, 32, 8, 1, true);
  p.seq_k.seqlen = 8192;
  static int32_t table;
  DeviceLimits gpu{90, 132, 228 << 10, 227 << 10};
  auto const splits = [&](int page_size, DType dtype) {
    p.kv.block_table = &table, p.kv.page_size = page_size;
    p.k.dtype = p.v.dtype = dtype;
    return DecodeSplits::splits(p, 128, gpu, {});
  };
  CHECK_EQ(splits(1, DType::kFloat16), 2);
  CHECK_EQ(splits(16, DType::kFloat16), 2);
  CHECK_EQ(splits(17, DType::kFloat16), 1);
  CHECK_EQ(splits(16, DType::kFloat8E4M3), 1);
  gpu.smem_per_sm = 100 << 10;
  CHECK_EQ(splits(16, DType::kFloat16), 1);
  gpu.smem_per_sm = 228 << 10;
  p.kv.block_table = nullptr;
  CHECK_EQ(DecodeSplits::splits(p, 128, gpu, {}), 1);
}

TEST(the_cost_of_a_call) {
  TileCost const cost{128, 4.0f, 1.0f};
  Problem p = problem(1, 12, 12, 1024, false);
  CHECK_EQ(cost.of_call(p, 128, 96), 12.0f);  // 96 tiles of 8 steps
  CHECK_EQ(cost.of_call(p, 128, 95), 24.0f);
  p.mask.causal = true;  // 1 to 8 steps, 4.5 on average
  CHECK_EQ(cost.of_call(p, 128, 96), 12.0f);
  CHECK_EQ(cost.of_call(p, 128, 48), 17.0f);
  p.mask.window_left = 127;  // the first tile has 1 step, the others 2: nearly equal
  CHECK_EQ(cost.of_call(p, 128, 48), 2 * (4.0f + 1.75f));
  p = problem(1, 32, 8, 16, false);  // 4 heads of 16 rows are a tile
  p.seq_k.seqlen = 1024;
  CHECK_EQ(cost.of_call(p, 64, 8), 12.0f);
  CHECK_EQ(cost.of_call(problem(1, 8, 8, 0, false), 128, 132), 0.0f);
}

TEST(splits_are_those_of_packed_heads_before_a_kernel_is_compiled) {
  Problem p = problem(1, 32, 8, 1, true);
  p.seq_k.seqlen = 32768;
  DeviceLimits const gpu{89, 128};
  KernelFacts compiled, unknown;
  compiled.block_m = unknown.block_m = 16;
  compiled.packs_heads = 1;
  CHECK_EQ(DecodeParams::num_splits(p, gpu, unknown), 16);
  int64_t const bytes = DecodeParams::workspace_bytes(p, gpu, unknown);
  CHECK_EQ(DecodeParams::prepare(p, {nullptr, bytes}, gpu, compiled).splits.count, 16);
}

int main(int argc, char** argv) { return check::run(argc, argv); }
