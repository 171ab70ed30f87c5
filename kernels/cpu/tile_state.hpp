// The part of tile_body.hpp and quantized_body.hpp that is common to all instruction sets.
#pragma once

#include <vector>

#include "core/softmax.hpp"
#include "cpu/block.hpp"
#include "cpu/tile.hpp"

namespace cutlass_attn::cpu {

// State of a tile of rows between tiles of keys. Rows are padded to whole vectors.
struct State {
  static constexpr int kRows = kTileRows + kMaxLanes;
  VarlenSeqInfo seq;  // batch entry
  int32_t head[kRows], query[kRows], lo[kRows], hi[kRows];
  SoftmaxRow softmax[kRows];
  float scale[kRows];  // final factor of a row of O
  float* q;            // [block][head_dim][row]
  float* o;            // [block][head_dim_v][row], not yet divided by the row sum
  float* s;            // [key][row] of one block: scores, then weights

  explicit State(VarlenSeqInfo const& seq) : seq(seq) {}

  // Places q and o of padded_rows rows, and s of a block, in the scratch memory. Returns the
  // address behind them.
  float* place(float* scratch, int padded_rows, int block, Problem const& p) {
    q = scratch;
    o = q + int64_t(padded_rows) * p.head_dim;
    s = o + int64_t(padded_rows) * p.head_dim_v;
    return s + block * kTileKeys;
  }
};

// Valid rows in the list of a tile's single query; empty without lists.
inline std::vector<int32_t> rows_of_list(Problem const& p, Tile const& tile, int keys) {
  std::vector<int32_t> rows;
  KeyList const list(p, tile.batch, tile.q_begin);
  for (int j = 0; list.rows && j < keys; ++j) {
    if (list(j) >= 0) rows.push_back(list(j));
  }
  return rows;
}

}  // namespace cutlass_attn::cpu
