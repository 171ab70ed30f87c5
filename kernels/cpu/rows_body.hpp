// Operations of the per-instruction-set bodies (each_isa.hpp) on the rows of a tile: their
// addresses, their scores with a tile of keys, and storing their output.

#include "cpu/block_body.hpp"

// Number of rows in the block that starts at `row`.
CA_CPU_TARGET inline int block_width(int row, int rows) {
  return std::min(kBlock, (rows - row + kLanes - 1) / kLanes * kLanes);
}

// Sets the rows of a tile. Rows beyond the last query, up to `padded`, have all keys masked, by an
// empty interval or as in the last row.
CA_CPU_TARGET inline void place_rows(State& state, IntervalMask const& mask, Tile const& tile,
                                     int padded) {
  for (int r = 0; r < padded; ++r) state.softmax[r] = {};
  int r = 0;
  for (int query = tile.q_begin; query < tile.q_end; ++query) {
    for (int head = 0; head < tile.heads; ++head, ++r) {
      state.head[r] = tile.head_begin + head;
      state.query[r] = query;
      state.lo[r] = mask.lo(query);
      state.hi[r] = mask.hi(query);
    }
  }
  for (; r < padded; ++r) {
    state.head[r] = state.head[r - 1];
    state.query[r] = state.query[r - 1];
    state.lo[r] = state.hi[r] = 0;
  }
}

// First element of a row of q or o.
template <class Element>
CA_CPU_TARGET Element* row_of(Operand const& t, State const& state, int row) {
  return state.seq.template queries<Element>(t, state.head[row]) + state.query[row] * t.row_stride;
}

template <class Element>
CA_CPU_TARGET void store_output(Problem const& p, State const& state, int rows) {
  for (int row = 0; row < rows; row += kBlock) {
    int const width = block_width(row, rows);
    for (int r = 0; r < width && row + r < rows; ++r) {
      float const scale = state.scale[row + r];
      float const* const source = state.o + int64_t(row) * p.head_dim_v + r;
      Element* const target = row_of<Element>(p.o, state, row + r);
      float finished[kMaxHeadDim];
      for (int d = 0; d < p.head_dim_v; ++d) finished[d] = source[d * width] * scale;
      for (int d = 0; d < p.head_dim_v; ++d) from_float(finished[d], target[d]);
    }
  }
}

// Computes the masked scores of keys [key, key + keys) for a block of rows, in place in `s`, and
// the largest score of each row in `best`.
template <int kVectors, bool kMasked, class Score>
CA_CPU_TARGET void apply_scores(Score const& score, State const& state, int row, int key, int keys,
                                float* s, float* best) {
  constexpr int kWidth = kVectors * kLanes;
  int32_t const* const lo = state.lo + row;
  int32_t const* const hi = state.hi + row;
  for (int r = 0; r < kWidth; ++r) best[r] = -kInf;
  for (int k = key; k < key + keys; ++k, s += kWidth) {
    for (int r = 0; r < kWidth; ++r) {
      float x = score(s[r], state.seq.batch, state.head[row + r], state.query[row + r], k);
      if (kMasked) x = (k >= lo[r]) & (k < hi[r]) ? x : -kInf;
      best[r] = x > best[r] ? x : best[r];  // ignores NaN; the weights will have it
      s[r] = x;
    }
  }
}

template <int kVectors, class Score>
CA_CPU_TARGET void apply_scores(Score const& score, State const& state, int row, int key, int keys,
                                bool is_full, float* s, float* best) {
  if (is_full) {
    apply_scores<kVectors, false>(score, state, row, key, keys, s, best);
  } else {
    apply_scores<kVectors, true>(score, state, row, key, keys, s, best);
  }
}
