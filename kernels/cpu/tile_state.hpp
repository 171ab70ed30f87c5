// What tile_body.hpp and quantized_body.hpp need once, whatever the instruction set.
#pragma once

#include "core/softmax.hpp"
#include "cpu/block.hpp"
#include "cpu/tile.hpp"

namespace cutlass_attn::cpu {

// What a tile keeps from one tile of keys to the next. Rows are padded to whole vectors.
struct State {
  static constexpr int kRows = kTileRows + kMaxLanes;
  VarlenSeqInfo seq;  // the batch entry
  int32_t head[kRows], query[kRows], lo[kRows], hi[kRows];
  SoftmaxRow softmax[kRows];
  float scale[kRows];  // what finishes a row of O
  float* q;            // [block][head_dim][row]
  float* o;            // [block][head_dim_v][row], not yet divided by the sum
  float* s;            // [key][row] of one block: scores, then weights

  explicit State(VarlenSeqInfo const& seq) : seq(seq) {}

  // Puts q and o of so many rows, and s of those of a block, into the scratch memory. Returns what
  // comes behind them.
  float* place(float* scratch, int padded_rows, int block, Problem const& p) {
    q = scratch;
    o = q + int64_t(padded_rows) * p.head_dim;
    s = o + int64_t(padded_rows) * p.head_dim_v;
    return s + block * kTileKeys;
  }
};

}  // namespace cutlass_attn::cpu
