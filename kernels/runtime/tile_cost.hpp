// Predicts the time of a call for a tile shape, from two numbers fitted to measurements.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/mask.hpp"
#include "core/problem.hpp"
#include "core/scheduler.hpp"

namespace cutlass_attn {

// Cost of a variant, from manifest.toml. Only ratios between variants matter.
struct TileCost {
  int block_n = 0;                       // keys per step; 0: unknown
  float tile_us = 0.0f, step_us = 0.0f;  // of a tile of rows, and of each of its steps

  bool is_known() const { return block_n > 0; }

  // Time of all tiles of block_m rows on num_sms SMs. Equal tiles run in whole waves. Unequal
  // tiles, as under a causal mask, fill the SMs evenly, unless the longest tile alone takes longer.
  float of_call(Problem const& p, int block_m, int num_sms) const {
    int const heads = TileScheduler::heads_of_tile(p, block_m);
    int64_t const tiles = TileScheduler::blocks_of(p, block_m, heads);
    int64_t const sms = std::max(num_sms, 1);
    if (tiles == 0) return 0.0f;
    Steps const steps = steps_of(p, std::max(block_m / heads, 1));
    float const longest = tile_us + step_us * steps.most;
    if (steps.mean == steps.most) return longest * float((tiles + sms - 1) / sms);
    float const all = float(tiles) * (tile_us + step_us * steps.mean);
    return std::max(longest, all / float(sms));
  }

 private:
  struct Steps {
    float mean, most;
  };

  // Steps of tiles of `queries` queries, interpolated between the first, the middle two and the
  // last tile of a head.
  Steps steps_of(Problem const& p, int queries) const {
    IntervalMask const mask(p.mask, {p.seq_q.seqlen, p.seq_k.seqlen});
    int const last = (p.seq_q.seqlen - 1) / queries;
    auto const steps = [&](int tile) {
      int const begin = tile * queries, end = std::min(begin + queries, p.seq_q.seqlen);
      TileRange const range = mask.tiles(begin, end, block_n);
      return float(std::max(range.end - range.begin, 0));
    };
    float const at[] = {steps(0), steps(last / 2), steps((last + 1) / 2), steps(last)};
    return {(at[0] + at[1] + at[2] + at[3]) / 4.0f, *std::max_element(at, at + 4)};
  }
};

}  // namespace cutlass_attn
