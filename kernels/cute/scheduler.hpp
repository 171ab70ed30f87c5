// Which tile of which head a thread block works on.
#pragma once

#include <cute/config.hpp>

#include "core/params.hpp"

namespace cutlass_attn {

// Query heads that share a tile. With fewer queries than a tile has rows, as in decoding, the heads
// of one KV head fill the rest of it: K and V are then read once for all of them.
CUTE_HOST_DEVICE int heads_per_tile(AttnParams const& p, int block_m) {
  int const group = p.num_heads_q / p.num_heads_kv;
  return p.seqlen_q < block_m && group <= 1024 ? group : 1;  // the limit: see TileCoord::query()
}

// Size of the 1-d grid: one block for every tile of block_m rows of every head or group of heads.
CUTE_HOST_DEVICE int64_t num_tiles(AttnParams const& p, int block_m, int heads = 1) {
  return int64_t(p.batch) * (p.num_heads_q / heads) *
         ((int64_t(p.seqlen_q) * heads + block_m - 1) / block_m);
}

// Blocks run through the tiles of one head before the next, so that neighbours share K and V in
// L2, and from the last queries to the first, because under a causal mask those see most keys and
// the longest work should start first.
struct TileCoord {
  int32_t batch;
  int32_t heads;            // query heads in this tile, see heads_per_tile()
  int32_t head_q, head_kv;  // the first of them, and the KV head they share
  int32_t row_begin;        // of the tile: row r of a head group is query r / heads, head r % heads
  int32_t rows;             // inside the sequence, counted from row_begin
  int32_t q_begin, q_end;   // queries [q_begin, q_end) have rows in this tile
  uint32_t inverse;         // of heads, times 2^31, rounded up

  CUTE_DEVICE TileCoord(AttnParams const& p, int block_m, int block, int heads_ = 1)
      : heads(heads_), inverse(((1u << 31) - 1) / uint32_t(heads_) + 1) {
    int const all_rows = p.seqlen_q * heads;
    int const tiles = (all_rows - 1) / block_m + 1;
    int const group = block / tiles;  // batch and group of heads together
    int const tile = tiles - 1 - (block - group * tiles);
    int const groups = p.num_heads_q / heads;
    batch = group / groups;
    head_q = (group - batch * groups) * heads;
    head_kv = head_q / (p.num_heads_q / p.num_heads_kv);
    row_begin = tile * block_m;
    rows = all_rows - row_begin < block_m ? all_rows - row_begin : block_m;
    q_begin = query(0);
    q_end = query(rows - 1) + 1;
  }

  // Query and head of a row of the tile. Instead of a division, which takes some 20 instructions
  // and would be done for every row: exact while the row's number times heads is below 2^31, and
  // always for one head.
  CUTE_DEVICE int query(int row) const {
    return int(uint64_t(uint32_t(row_begin + row)) * inverse >> 31);
  }
  CUTE_DEVICE int head(int row) const { return head_q + (row_begin + row) - query(row) * heads; }

  // Address of row 0 of this tile's batch entry and the given head.
  template <class Element>
  CUTE_DEVICE Element* head_of(TensorRef const& t, int head) const {
    return static_cast<Element*>(t.data) + batch * t.batch_stride + head * t.head_stride;
  }

  // Address of a row of q or o.
  template <class Element>
  CUTE_DEVICE Element* row_of(TensorRef const& t, int row) const {
    return head_of<Element>(t, head(row)) + query(row) * t.row_stride;
  }

  // Index of a row in softmax_lse.
  CUTE_DEVICE int64_t lse_of(AttnParams const& p, int row) const {
    return (int64_t(batch) * p.num_heads_q + head(row)) * p.seqlen_q + query(row);
  }

  // Index of query 0 of this head in softmax_lse.
  CUTE_DEVICE int64_t lse_row(AttnParams const& p) const {
    return (int64_t(batch) * p.num_heads_q + head_q) * p.seqlen_q;
  }
};

}  // namespace cutlass_attn
