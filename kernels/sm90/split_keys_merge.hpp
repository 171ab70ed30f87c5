// Merges the partial results of a cluster's warpgroups: first within each block, then across
// blocks. Each warpgroup merges a share of the columns; each thread merges one position of all
// partial results.
#pragma once

#include "core/epilogue.hpp"
#include "core/vector.hpp"
#include "sm90/split_keys_config.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct SplitKeysMerge {
  using Element = typename Config::Element;
  using Shared = typename Config::SharedStorage;
  using Place = typename Config::Place;
  using Target = typename Shared::Target;
  static constexpr int kRows = Config::kRows;
  // Blocks of eight columns that a warpgroup merges across thread blocks.
  static constexpr int kMax = (Config::kShare + 1) / 2;

  ClusterSplitsParams const& params;
  Shared& shared;

  // Computes the addresses of a row's results, before there is anything to merge.
  CUTE_DEVICE void set_target(TileCoord const& tile, int row) const {
    Problem const& p = params.forward.problem;
    Target target = {nullptr, nullptr, -kInf};
    if (row < tile.rows) {
      int const head = tile.head(row), query = tile.query(row);
      target.o = tile.template row_of<Element>(p.o, row);
      if (p.softmax_lse) target.lse = p.softmax_lse + tile.seq.lse(p, head, query);
      if (p.logits.sinks) {
        Arch::griddepcontrol_wait();
        target.sink = p.logits.sinks[head];
      }
    }
    shared.targets[row] = target;
  }

  // Merges the two parts of a block. Each warpgroup keeps half of its columns in registers and
  // passes the other half to the other warpgroup.
  template <class Group>
  CUTE_DEVICE void run(Group& in) const {
    Place const place{Arch::thread() % Config::kGroupThreads};
    int const group = in.group;
    auto const quad = [&](int d, bool is_first) {
      Quad quad;
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) {
        quad.values[e] = is_first ? in.acc_o(e, 0, d) : in.acc_o(e, 0, Config::kShare + d);
      }
      return quad;
    };
    for (int i = 0; i < kRows; ++i) {
      if (place.column(0) == 0) shared.rows[group][place.row(i)] = in.softmax.rows[i];
    }
    in.sync_group();  // V empty
    CUTE_UNROLL
    for (int d = 0; d < Config::kShare; ++d) {
      shared.buffers[group].given[d][place.thread] = quad(d, group != 0);
    }
    Arch::sync();  // parts full
    SoftmaxRow parts[2][kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      for (int g = 0; g < 2; ++g) parts[g][i] = shared.rows[g][place.row(i)];
    }
    Rows rows(shared, place);
    float mine[kRows], others[kRows];  // factors of the two parts
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows.state[i] = parts[0][i];
      float second, first = rows.state[i].merge(parts[1][i], 1.0f, second);
      mine[i] = group == 0 ? first : second;
      others[i] = group == 0 ? second : first;
    }
    bool const is_alone = params.blocks == 1;
    if (is_alone) {
      rows.finish(params.forward.problem);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) mine[i] *= rows.factor[i], others[i] *= rows.factor[i];
    }
    Quad sums[Config::kShare];
    CUTE_UNROLL
    for (int d = 0; d < Config::kShare; ++d) {
      Quad const own = quad(d, group == 0);
      Quad const other = shared.buffers[1 - group].given[d][place.thread];
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) {
        sums[d].values[e] = fmaf(other.values[e], others[e / 2], own.values[e] * mine[e / 2]);
      }
    }
    if (is_alone) {
      store(place, rows, sums, group * Config::kShare, Config::kShare);
    } else {
      run_cluster(place, group, rows, sums);
    }
  }

 private:
  // A thread's rows: softmax state, addresses of the results, and factors that normalise O.
  struct Rows {
    SoftmaxRow state[kRows];
    Target target[kRows];
    float factor[kRows];

    CUTE_DEVICE Rows(Shared const& shared, Place const& place) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) target[i] = shared.targets[place.row(i)];
    }
    // As finish_row(), for rows that may not exist.
    CUTE_DEVICE void finish(Problem const& p) {
      float rescale[kRows] = {1.0f, 1.0f};
      unpredicated_if(p.logits.sinks != nullptr, [&] {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) rescale[i] = state[i].add_logit(target[i].sink, 1.0f);
      });
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) factor[i] = rescale[i] * state[i].inverse_sum();
    }
  };

  // Merges the parts of a cluster's blocks, in block order.
  CUTE_DEVICE void run_cluster(Place const& place, int group, Rows& rows,
                               Quad (&sums)[Config::kShare]) const {
    CUTE_UNROLL
    for (int d = 0; d < Config::kShare; ++d) {
      shared.buffers[group].merged[d][place.thread] = sums[d];
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (group == 0 && place.column(0) == 0) shared.merged_rows[place.row(i)] = rows.state[i];
    }
    Arch::cluster_sync();  // parts full
    int const shares = params.blocks * Config::kGroups;
    int const count = (Config::kColumnBlocks + shares - 1) / shares;
    int const first = (params.rank<Arch>() * Config::kGroups + group) * count;
    if (first < Config::kColumnBlocks) {
      add_blocks(place, first, count, rows, sums);
      store(place, rows, sums, first, count);
    }
    Arch::cluster_leave();  // parts empty: no block exits while another reads its part
  }

  CUTE_DEVICE void add_blocks(Place const& place, int first, int count, Rows& rows,
                              Quad (&sums)[Config::kShare]) const {
    auto const part_of = [&](int i, int block) {
      return *Arch::mapa(&shared.merged_rows[place.row(i)], block);
    };
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) rows.state[i] = SoftmaxRow();
    CUTE_NO_UNROLL
    for (int b = 0; b < params.blocks; ++b) {
      for (int i = 0; i < kRows; ++i) {
        rows.state[i].max = fmaxf(rows.state[i].max, part_of(i, b).max);
      }
    }
    auto const& from = shared.buffers[first / Config::kShare].merged;
    CUTE_UNROLL
    for (int d = 0; d < kMax; ++d) sums[d] = {};
    CUTE_NO_UNROLL
    for (int b = 0; b < params.blocks; ++b) {
      float factors[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        SoftmaxRow const part = part_of(i, b);
        factors[i] = rows.state[i].weight(part.max, 1.0f);
        rows.state[i].sum = fmaf(part.sum, factors[i], rows.state[i].sum);
      }
      CUTE_UNROLL
      for (int d = 0; d < kMax; ++d) {
        if (d >= count) continue;
        Quad const part = *Arch::mapa(&from[first % Config::kShare + d][place.thread], b);
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          sums[d].values[e] = fmaf(part.values[e], factors[e / 2], sums[d].values[e]);
        }
      }
    }
    rows.finish(params.forward.problem);
    CUTE_UNROLL
    for (int d = 0; d < kMax; ++d) {
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) sums[d].values[e] *= rows.factor[e / 2];
    }
  }

  // Rounds and stores `count` blocks of eight columns, starting at block `first`.
  CUTE_DEVICE void store(Place const& place, Rows const& rows, Quad const (&sums)[Config::kShare],
                         int first, int count) const {
    int const lane = place.thread % 4, columns = params.forward.problem.head_dim_v;
    uint32_t words[kRows][Config::kShare];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int d = 0; d < Config::kShare; ++d) {
        float const* const pair = sums[d].values + 2 * i;
        words[i][d] = Arch::template pack<Element>(pair[0], pair[1]);
      }
    }
    if (count % 4 == 0) {
      CUTE_UNROLL
      for (int d = 0; d < Config::kShare; d += 4) {
        int const column = (first + d + lane) * 8;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          auto& four = reinterpret_cast<uint32_t (&)[4]>(words[i][d]);
          transpose_quad<Arch>(four, lane);
          if (d >= count || column >= columns || rows.target[i].o == nullptr) continue;
          *reinterpret_cast<Vector16*>(rows.target[i].o + column) =
              *reinterpret_cast<Vector16 const*>(four);
        }
      }
    } else {
      CUTE_UNROLL
      for (int d = 0; d < kMax; ++d) {
        int const column = (first + d) * 8 + place.column(0);
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          if (d >= count || column >= columns || rows.target[i].o == nullptr) continue;
          *reinterpret_cast<uint32_t*>(rows.target[i].o + column) = words[i][d];
        }
      }
    }
    if (first != 0 || place.column(0) != 0) return;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if (rows.target[i].lse) *rows.target[i].lse = rows.state[i].lse(1.0f);
    }
  }
};

}  // namespace cutlass_attn::sm90
