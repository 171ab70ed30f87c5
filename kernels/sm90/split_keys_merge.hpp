// What the warpgroups of a cluster have of a tile of rows, merged: each of them has a share of the
// columns, of which every thread takes what is at its own place in all parts.
#pragma once

#include "core/epilogue.hpp"
#include "sm90/split_keys_config.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct SplitKeysMerge {
  using Element = typename Config::Element;
  using Shared = typename Config::SharedStorage;
  using Quad = typename Config::Quad;
  using Target = typename Shared::Target;
  static constexpr int kRows = Config::kRows;

  ClusterSplitsParams const& params;
  Shared& shared;

  // Before there is anything to merge: where a row of the tile goes.
  CUTE_DEVICE void set_target(TileCoord const& tile, int row) const {
    Problem const& p = params.forward.problem;
    Target target = {nullptr, nullptr, -kInf};
    if (row < tile.rows) {
      int const head = tile.head(row), query = tile.query(row);
      target.o = tile.template row_of<Element>(p.o, row);
      if (p.softmax_lse) target.lse = p.softmax_lse + tile.seq.lse(p, head, query);
      if (p.logits.sinks) target.sink = p.logits.sinks[head];
    }
    shared.targets[row] = target;
  }

  // In the order of the parts. blocks: of the cluster; of(x, b): x in block b.
  template <class Of>
  CUTE_DEVICE void run(int group, int blocks, Of&& of) const {
    typename Config::Place const place{Arch::thread() % Config::kGroupThreads};
    SoftmaxRow rows[kRows];
    for_parts(blocks, [&](int b, int g) {
      for (int i = 0; i < kRows; ++i) {
        rows[i].max = fmaxf(rows[i].max, of(&shared.rows[g][place.row(i)], b)->max);
      }
    });
    int const shares = blocks * Config::kGroups;
    int const count = (Config::kColumnBlocks + shares - 1) / shares;
    int const first = (params.rank<Arch>() * Config::kGroups + group) * count;
    if (first >= Config::kColumnBlocks) return;
    // As many as there are with one block; with more some are of nobody.
    constexpr int kMost = Config::kColumnBlocks / Config::kGroups;
    Quad sums[kMost] = {};
    for_parts(blocks, [&](int b, int g) {
      float factors[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        SoftmaxRow const part = *of(&shared.rows[g][place.row(i)], b);
        factors[i] = rows[i].weight(part.max, 1.0f);
        rows[i].sum = fmaf(part.sum, factors[i], rows[i].sum);
      }
      CUTE_UNROLL
      for (int d = 0; d < kMost; ++d) {
        if (d >= count) continue;
        Quad const part = *of(&shared.buffers[g].part[first + d][place.thread], b);
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          sums[d].values[e] = fmaf(part.values[e], factors[e / 2], sums[d].values[e]);
        }
      }
    });
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      bool const has_lse = first == 0 && place.column(0) == 0;
      store_row(shared.targets[place.row(i)], rows[i], has_lse, [&](auto const& store) {
        CUTE_UNROLL
        for (int d = 0; d < kMost; ++d) {
          int const column = (first + d) * 8 + place.column(0);
          if (d < count) store(column, sums[d].values[2 * i], sums[d].values[2 * i + 1]);
        }
      });
    }
  }

 private:
  template <class Visit>
  CUTE_DEVICE static void for_parts(int blocks, Visit&& visit) {
    CUTE_NO_UNROLL
    for (int b = 0; b < blocks; ++b) {
      CUTE_UNROLL
      for (int g = 0; g < Config::kGroups; ++g) visit(b, g);
    }
  }

  // for_pairs(store) calls store(column, x, y) for the pairs of columns that this thread has.
  template <class ForPairs>
  CUTE_DEVICE void store_row(Target const& target, SoftmaxRow& row, bool has_lse,
                             ForPairs&& for_pairs) const {
    if (target.o == nullptr) return;
    float const rescale = target.sink == -kInf ? 1.0f : row.add_logit(target.sink, 1.0f);
    if (has_lse && target.lse) *target.lse = row.lse(1.0f);
    float const factor = rescale * row.inverse_sum();
    for_pairs([&](int column, float x, float y) {
      if (column >= params.forward.problem.head_dim_v) return;
      *reinterpret_cast<uint32_t*>(target.o + column) =
          Arch::template pack<Element>(x * factor, y * factor);
    });
  }
};

}  // namespace cutlass_attn::sm90
