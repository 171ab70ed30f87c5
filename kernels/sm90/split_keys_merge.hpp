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
      Target const target = shared.targets[place.row(i)];
      float const factor = finish(target, rows[i], first == 0 && place.column(0) == 0);
      uint32_t words[kMost];
      CUTE_UNROLL
      for (int d = 0; d < kMost; ++d) {
        float const* const pair = sums[d].values + 2 * i;
        words[d] = Arch::template pack<Element>(pair[0] * factor, pair[1] * factor);
      }
      store(target, words, first, count, place);
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

  // As finish_row(), of a row that may not be there.
  CUTE_DEVICE static float finish(Target const& target, SoftmaxRow& row, bool writes_lse) {
    float const rescale = target.sink == -kInf ? 1.0f : row.add_logit(target.sink, 1.0f);
    if (writes_lse && target.lse) *target.lse = row.lse(1.0f);
    return rescale * row.inverse_sum();
  }

  // Words of two columns, `count` of them, from blocks of eight columns that begin with `first`.
  template <int kMost>
  CUTE_DEVICE void store(Target const& target, uint32_t (&words)[kMost], int first, int count,
                         typename Config::Place const& place) const {
    int const lane = place.thread % 4, columns = target.o ? params.forward.problem.head_dim_v : 0;
    if (count % 4 == 0) {
      CUTE_UNROLL
      for (int d = 0; d < kMost; d += 4) {
        if (d >= count) continue;
        auto& four = reinterpret_cast<uint32_t (&)[4]>(words[d]);
        transpose_quad<Arch>(four, lane);
        int const column = (first + d + lane) * 8;
        if (column >= columns) continue;
        *reinterpret_cast<uint128_t*>(target.o + column) =
            *reinterpret_cast<uint128_t const*>(four);
      }
    } else {
      CUTE_UNROLL
      for (int d = 0; d < kMost; ++d) {
        int const column = (first + d) * 8 + place.column(0);
        if (d >= count || column >= columns) continue;
        *reinterpret_cast<uint32_t*>(target.o + column) = words[d];
      }
    }
  }
};

}  // namespace cutlass_attn::sm90
