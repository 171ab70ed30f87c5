// Which tile of which head a thread block works on.
#pragma once

#include <cute/config.hpp>

#include "core/params.hpp"

namespace cutlass_attn {

// Size of the 1-d grid: one block for every tile of block_m queries of every head.
inline int64_t num_tiles(AttnParams const& p, int block_m) {
  return int64_t(p.batch) * p.num_heads_q * ((int64_t(p.seqlen_q) + block_m - 1) / block_m);
}

// Blocks run through the tiles of one head before the next, so that neighbours share K and V in
// L2, and from the last queries to the first, because under a causal mask those see most keys and
// the longest work should start first.
struct TileCoord {
  int32_t batch, head_q, head_kv;
  int32_t q_begin, q_end;  // queries [q_begin, q_end) are inside the sequence

  CUTE_DEVICE TileCoord(AttnParams const& p, int block_m, int block) {
    int const tiles = (p.seqlen_q - 1) / block_m + 1;
    int const head = block / tiles;  // batch and head together
    int const tile = tiles - 1 - (block - head * tiles);
    batch = head / p.num_heads_q;
    head_q = head - batch * p.num_heads_q;
    head_kv = head_q / (p.num_heads_q / p.num_heads_kv);
    q_begin = tile * block_m;
    q_end = p.seqlen_q - q_begin < block_m ? p.seqlen_q : q_begin + block_m;
  }

  // Address of row 0 of this tile's batch entry and the given head.
  template <class Element>
  CUTE_DEVICE Element* head_of(TensorRef const& t, int head) const {
    return static_cast<Element*>(t.data) + batch * t.batch_stride + head * t.head_stride;
  }

  // Index of query 0 of this head in softmax_lse.
  CUTE_DEVICE int64_t lse_row(AttnParams const& p) const {
    return (int64_t(batch) * p.num_heads_q + head_q) * p.seqlen_q;
  }
};

}  // namespace cutlass_attn
