// Results of blocks that share the keys of a tile of rows, and the launch that merges them. The
// last of these blocks alone would read them at the rate of an SM, 43 GB/s on an H200.
#pragma once

#include <cute/config.hpp>

#include "core/epilogue.hpp"
#include "core/terms/max_logit.hpp"
#include "core/vector.hpp"
#include "latent/params.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn {

// Result of a split: O, not normalised, as m16n8 accumulators of 16 rows x 8 columns, and the
// softmax state of the rows. Blocks of rows that the tile lacks are not stored.
template <int kBlockM, int kHeadDimV>
struct SplitResult {
  static constexpr int kColumnBlocks = kHeadDimV / 8;

  float* data;

  CUTE_DEVICE static SplitResult of(KeySplits const& splits, int unit, int split) {
    return {splits.partial(unit, split, KeySplits::partial_floats(kBlockM, kHeadDimV))};
  }
  // A lane's part of an accumulator.
  CUTE_DEVICE Quad& o(int row_block, int column_block, int lane) const {
    return reinterpret_cast<Quad*>(data)[(row_block * kColumnBlocks + column_block) * 32 + lane];
  }
  CUTE_DEVICE SoftmaxRow& state(int row) const {
    return reinterpret_cast<SoftmaxRow*>(data + kBlockM * kHeadDimV)[row];
  }

  // Stores a warp's accumulators, whose first column block is `first`.
  template <class O>
  CUTE_DEVICE void store(O const& acc_o, int row_block, int first, int lane) const {
    CUTE_UNROLL
    for (int b = 0; b < O::kN; ++b) {
      auto const& x = acc_o.block(0, b);
      o(row_block, first + b, lane) = {{x[0], x[1], x[2], x[3]}};
    }
  }
};

// A warp reads eight parts of 16 rows x 16 columns at a time: of eight splits, or of few splits for
// several columns. With more than eight splits, the warps of a block share them, and the block adds
// up the warps. kNeighbours: whether the four columns that a lane has of 16 are neighbours, as with
// 8-bit products (tile/products_fp8.hpp).
template <class Element, int kBlockM, int kHeadDimV, bool kNeighbours>
struct LatentMerge {
  using Result = SplitResult<kBlockM, kHeadDimV>;
  using Merge = LatentSplits::Merge;
  static constexpr int kThreads = Merge::kThreads, kWarps = kThreads / 32;
  static constexpr int kM = Merge::kRows, kColumns = Merge::kColumns, kAtOnce = Merge::kAtOnce;
  static constexpr int kBlocks = kColumns / 8;       // m16n8, of a warp
  static constexpr int kRowThreads = kThreads / kM;  // that merge the states of a row
  static_assert(kM == 16 && kBlocks == 2 && kRowThreads == 16);

  struct Shared {
    float weights[KeySplits::kMax][kM];  // of the splits, for each row
    Quad sums[kWarps][kBlocks][32];      // of the warps
    float factors[kM];                   // that normalise the rows
  };
  static constexpr int kSmemBytes = sizeof(Shared);
  static_assert(kSmemBytes <= Merge::kBytes);

  template <class Arch>
  CUTE_DEVICE static void run(LatentParams const& params, char* smem) {
    Shared& shared = *reinterpret_cast<Shared*>(smem);
    Merge const& merge = params.merge;
    int const job = Arch::block() >> merge.log2_groups;
    int const group = Arch::block() - (job << merge.log2_groups);  // of columns
    int const unit = merge.by_row_blocks(job), row_block = job - unit * merge.row_blocks;
    auto const tile = params.template tile_of<kBlockM, Arch>(unit);
    if (row_block * kM >= tile.rows) return;

    int const count = params.splits.count, lane = Arch::thread() % 32;
    int const warp = Arch::uniform(Arch::thread() / 32);
    int const turn = warp >> merge.log2_shares;  // of the warps that share splits
    int const share = warp - (turn << merge.log2_shares);
    int const item = ((group * kWarps >> merge.log2_shares) + turn) << merge.log2_items;
    // Of the i-th part: its split, and its item, 16 columns.
    auto const split_of = [&](int first, int i) {
      int const turn = i & ((kAtOnce >> merge.log2_items) - 1);
      return first + (turn << merge.log2_shares);
    };
    auto const item_of = [&](int i) { return item + (i << merge.log2_items) / kAtOnce; };
    Quad parts[kAtOnce][kBlocks];
    auto const read = [&](int first) {
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const split = split_of(first, i);
        if (split >= count) continue;
        CUTE_UNROLL
        for (int b = 0; b < kBlocks; ++b) {
          parts[i][b] =
              Result::of(params.splits, unit, split).o(row_block, item_of(i) * kBlocks + b, lane);
        }
      }
    };
    read(share);
    merge_states<Arch>(params, tile, unit, row_block, group == 0, shared);
    auto const store = [&](int item, Quad const(&sums)[kBlocks]) {
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const row = lane / 4 + 8 * i, in_tile = row_block * kM + row;
        if (in_tile >= tile.rows) continue;
        store_row<Arch>(tile.template row_of<Element>(params.problem.o, in_tile),
                        params.problem.head_dim_v, item * kColumns, lane, sums, i,
                        shared.factors[row]);
      }
    };
    Quad sums[kBlocks] = {};
    for (int first = share; first < count; first += kAtOnce << merge.log2_shares) {
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const split = split_of(first, i);
        if (split < count) add(parts[i], shared.weights[split], lane, sums);
        if (i % 2 == 0 || item_of(i) == item_of(i + 1) || i == kAtOnce - 1) continue;
        store(item_of(i), sums);
        CUTE_UNROLL
        for (int b = 0; b < kBlocks; ++b) sums[b] = {};
      }
      if (merge.log2_items == 0) read(first + (kAtOnce << merge.log2_shares));
    }
    auto* const of_others = shared.sums + (turn << merge.log2_shares);
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      if (share > 0) of_others[share][b][lane] = sums[b];
    }
    Arch::sync();  // sums full
    if (share > 0) return;
    for (int other = 1; other < 1 << merge.log2_shares; ++other) {
      CUTE_UNROLL
      for (int b = 0; b < kBlocks; ++b) {
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) sums[b].values[e] += of_others[other][b][lane].values[e];
      }
    }
    store(item_of(kAtOnce - 1), sums);
  }

 private:
  // Merges the states of the rows, 16 threads a row: weights of the splits, and the factors that
  // normalise O. One group stores LSE and the largest logits.
  template <class Arch, class Coord>
  CUTE_DEVICE static void merge_states(LatentParams const& params, Coord const& tile, int unit,
                                       int row_block, bool stores, Shared& shared) {
    Problem const& p = params.problem;
    int const row = Arch::thread() / kRowThreads, turn = Arch::thread() % kRowThreads;
    int const in_tile = row_block * kM + row, count = params.splits.count;
    bool const is_row = in_tile < tile.rows;
    auto const state = [&](int split) {
      return Result::of(params.splits, unit, split).state(in_tile);
    };
    SoftmaxRow merged;
    for (int i = turn; i < count && is_row; i += kRowThreads) {
      merged.max = fmaxf(merged.max, state(i).max);
    }
    CUTE_UNROLL
    for (int mask = 1; mask < kRowThreads; mask *= 2) {
      merged.max = fmaxf(merged.max, Arch::shuffle_xor(merged.max, mask));
    }
    for (int i = turn; i < count; i += kRowThreads) {
      SoftmaxRow const part = is_row ? state(i) : SoftmaxRow();
      float const weight = merged.weight(part.max, 1.0f);
      merged.sum = fmaf(part.sum, weight, merged.sum);
      shared.weights[i][row] = weight;
    }
    CUTE_UNROLL
    for (int mask = 1; mask < kRowThreads; mask *= 2) {
      merged.sum += Arch::shuffle_xor(merged.sum, mask);
    }
    if (turn == 0 && is_row) {
      int const head = tile.head(in_tile), query = tile.query(in_tile);
      if (p.max_logits && stores) MaxLogit::store(p, tile.seq, head, query, merged.max);
      shared.factors[row] =
          finish_row(p, tile.seq, head, query, merged, 1.0f, stores) * scale_of(p.v, tile.head_kv);
    }
    Arch::sync();  // weights and factors full
  }

  // Adds a part, times the weights of a lane's two rows.
  CUTE_DEVICE static void add(Quad const (&part)[kBlocks], float const (&weights)[kM], int lane,
                              Quad (&sums)[kBlocks]) {
    float const of_rows[2] = {weights[lane / 4], weights[lane / 4 + 8]};
    CUTE_UNROLL
    for (int b = 0; b < kBlocks; ++b) {
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) {
        sums[b].values[e] = fmaf(part[b].values[e], of_rows[e / 2], sums[b].values[e]);
      }
    }
  }

  // Stores a lane's columns of its i-th row.
  template <class Arch>
  CUTE_DEVICE static void store_row(Element* row, int columns, int column, int lane,
                                    Quad const (&sums)[kBlocks], int i, float factor) {
    auto const pair = [&](float x, float y) {
      return Arch::template pack<Element>(x * factor, y * factor);
    };
    float const *const x = sums[0].values + 2 * i, *const y = sums[1].values + 2 * i;
    if constexpr (kNeighbours) {
      int const first = column + lane % 4 * 4;
      if (first >= columns) return;
      auto* const words = reinterpret_cast<uint32_t*>(row + first);
      words[0] = pair(x[0], y[0]);
      words[1] = pair(x[1], y[1]);
    } else {
      int const first = column + lane % 4 * 2;
      if (first < columns) *reinterpret_cast<uint32_t*>(row + first) = pair(x[0], x[1]);
      if (first + 8 < columns) *reinterpret_cast<uint32_t*>(row + first + 8) = pair(y[0], y[1]);
    }
  }
};

}  // namespace cutlass_attn
