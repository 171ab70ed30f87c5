// How long a call takes with tiles of some shape, by two numbers that were fitted to what a GPU
// took.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/mask.hpp"
#include "core/problem.hpp"
#include "core/scheduler.hpp"

namespace cutlass_attn {

// Of a variant in manifest.toml; only ratios between variants count.
struct TileCost {
  int block_n = 0;                       // keys of a step; 0: not known
  float tile_us = 0.0f, step_us = 0.0f;  // of a tile of rows, and of each of its steps

  bool is_known() const { return block_n > 0; }

  // Of all tiles of block_m rows, which num_sms SMs take one after the other. Tiles that are alike
  // come in whole waves; others, of a causal mask say, fill the SMs evenly, if none of them takes
  // longer than that.
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

  // Of tiles of so many queries: by the first, the middle two and the last of a head, between which
  // they are taken to lie on a line.
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
