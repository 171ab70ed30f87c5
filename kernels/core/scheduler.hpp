// Assignment of tiles and heads to thread blocks.
#pragma once

#include <cstdint>

#include "core/divide.hpp"
#include "core/macros.hpp"
#include "core/problem.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn {

// Order in which blocks take the tiles of all heads.
struct TileOrder {
  int32_t tiles;   // per head
  int32_t tail;    // number of last heads, whose tiles are interleaved
  int32_t before;  // number of heads before them
  FastDivisor by_tiles, by_tail;

  struct Place {
    int32_t head, turn;  // turn: order of the tile in its head; 0 has the most work
  };

  TileOrder() = default;
  TileOrder(int32_t tiles, int64_t heads, int32_t tail)
      : tiles(tiles),
        tail(int32_t(tail < heads ? tail : heads)),
        before(int32_t(heads - this->tail)),
        by_tiles(tiles),
        by_tail(this->tail > 0 ? this->tail : 1) {}

  // Blocks finish the tiles of one head before the next head, so that concurrent blocks share
  // operands in L2. Under a causal mask, the tiles of a head start with the one with the most work.
  // For the last `tail` heads, tiles run longest first across heads (LPT), so that short tiles fill
  // the last wave.
  CA_HOST_DEVICE Place place(int block) const {
    int const at = block - before * tiles;
    int const head = by_tiles(block), turn = by_tail(at < 0 ? 0 : at);
    if (at < 0) return {head, block - head * tiles};
    return {before + at - turn * tail, turn};
  }

  // Number of heads, of head_bytes each, that fit in L2 at once; 0 if all tiles do about equal
  // work.
  static int32_t tail_of(Mask const& mask, int64_t head_bytes) {
    constexpr int64_t kBytes = 32 << 20;  // L2 of Ada and Hopper is larger
    bool const has_end = mask.causal || mask.window_right != kUnbounded;
    bool const is_triangle = has_end && mask.window_left == kUnbounded && mask.attention_chunk == 0;
    if (!is_triangle) return 0;
    return int32_t(head_bytes < kBytes ? kBytes / (head_bytes > 0 ? head_bytes : 1) : 1);
  }
};

// If batch entries share the bias of a head, its tiles of all entries run before the next head, so
// that the bias is read from L2.
struct BiasOrder {
  int32_t entries;  // entries that run before the next head
  FastDivisor by_entries;

  static BiasOrder of(Problem const& p) {
    PerLogit const& bias = p.logits.bias;
    bool const is_shared = bias.data != nullptr && bias.batch_stride == 0 && p.batch > 1;
    int32_t const entries = is_shared ? p.batch : 1;
    return {entries, FastDivisor(entries)};
  }
  // `heads`: heads of each entry.
  CA_HOST_DEVICE TileOrder::Place place(TileOrder::Place place, int heads) const {
    if (entries > 1) {
      int const head = by_entries(place.head);
      place.head = (place.head - head * entries) * heads + head;
    }
    return place;
  }
};

// Rows of a head group, cut into tiles of block_m. If they do not fill all tiles, the first tile is
// shorter, by a multiple of kStep: under a causal mask the last tile has the most keys, so it
// should be full or nearly full.
struct TileRows {
  static constexpr int kStep = 64;
  int32_t tiles;  // at least one
  int32_t lacks;  // rows that are missing in the first tile

  TileRows() = default;
  CA_HOST_DEVICE TileRows(int32_t rows, int block_m)
      : tiles(rows > 0 ? int32_t((int64_t(rows) + block_m - 1) / block_m) : 1),
        lacks(int32_t(int64_t(tiles) * block_m - rows) / kStep * kStep) {}

  // First row of a tile; negative for a first tile that is shorter.
  CA_HOST_DEVICE int begin(int tile, int block_m) const { return tile * block_m - lacks; }
};

// Grid of a call, one block per tile of queries. Computed on the host; part of a kernel's
// parameters.
struct TileScheduler {
  // Query heads that share a tile. If there are fewer queries than a tile has rows, as in decoding,
  // a tile holds all query heads of a KV head, so that K and V are read once for all of them. Row r
  // of such a head group is query r / heads, head r % heads.
  int32_t heads;
  TileRows rows;    // rows of a head group
  int32_t groups;   // head groups of a batch entry
  int64_t blocks;   // of the grid
  TileOrder order;  // order of head groups; within one, from the last queries to the first
  FastDivisor by_groups, by_heads;
  FastDivisor by_heads_per_kv;  // query heads of a KV head

  // For kernels whose tiles have block_m rows. `pack`: a tile may hold rows of several heads.
  TileScheduler(Problem const& p, int block_m, bool pack)
      : heads(pack ? heads_of_tile(p, block_m) : 1),
        rows(p.seq_q.seqlen * heads, block_m),
        groups(at_least_1(p.num_heads_q / heads)),
        blocks(blocks_of(p, block_m, heads)),
        order(rows.tiles, int64_t(p.batch) * (p.num_heads_q / heads),
              TileOrder::tail_of(p.mask, bytes_of_group(p, heads))),
        by_groups(groups),
        by_heads(heads),
        by_heads_per_kv(at_least_1(p.num_heads_q / at_least_1(p.num_heads_kv))) {}

  static int64_t blocks_of(Problem const& p, int block_m, int heads) {
    int64_t const tiles = (int64_t(p.seq_q.seqlen) * heads + block_m - 1) / block_m;
    return int64_t(p.batch) * (p.num_heads_q / heads) * tiles;
  }

  // Number of heads to pack. A dropout draw covers two queries of one head that are 8 tile rows
  // apart, so dropout excludes packing.
  static int32_t heads_of_tile(Problem const& p, int block_m) {
    int const heads = at_least_1(p.num_heads_q / at_least_1(p.num_heads_kv));
    bool const packs = p.seq_q.seqlen < block_m && heads <= 1024 && p.dropout.p == 0.0f;
    return packs ? heads : 1;
  }

 private:
  // Bytes of K and V per head group; head groups that share a KV head divide its bytes.
  static int64_t bytes_of_group(Problem const& p, int32_t heads) {
    int64_t const of_kv_head = int64_t(p.seq_k.seqlen) * (p.head_dim + p.head_dim_v) * 2;
    return of_kv_head * heads / at_least_1(p.num_heads_q / at_least_1(p.num_heads_kv));
  }
};

// The tile of a block: its rows.
template <class SeqInfo>
struct BasicTileCoord {
  SeqInfo seq;              // batch entry
  int32_t heads;            // query heads in the tile
  int32_t head_q, head_kv;  // first query head, and the KV head of all of them
  int32_t row_begin;        // first row in the head group
  int32_t rows;             // rows inside the head group; <= 0: none
  int32_t q_begin, q_end;   // queries [q_begin, q_end) have rows in the tile
  FastDivisor by_heads;

  BasicTileCoord() = default;
  CA_HOST_DEVICE BasicTileCoord(Problem const& p, TileScheduler const& s, int block_m, int block)
      : BasicTileCoord(p, s, block_m, s.order.place(block)) {}
  CA_HOST_DEVICE BasicTileCoord(Problem const& p, TileScheduler const& s, int block_m,
                                TileOrder::Place place)
      : seq(p, s.by_groups(place.head)), heads(s.heads), by_heads(s.by_heads) {
    head_q = (place.head - seq.batch * s.groups) * heads;
    head_kv = s.by_heads_per_kv(head_q);
    set_rows(p, s.rows, s.rows.tiles - 1 - place.turn, block_m);
  }

  // A tile of the `heads` heads from head_q on.
  CA_HOST_DEVICE BasicTileCoord(Problem const& p, SeqInfo const& seq, int heads,
                                FastDivisor by_heads, int head_q, int head_kv, int tile,
                                int block_m)
      : seq(seq), heads(heads), head_q(head_q), head_kv(head_kv), by_heads(by_heads) {
    set_rows(p, TileRows(seq.lens(p).q * heads, block_m), tile, block_m);
  }

  // Query, and below the head, of a row of the tile.
  CA_HOST_DEVICE int query(int row) const {
    return heads == 1 ? row_begin + row : by_heads(row_begin + row);
  }
  CA_HOST_DEVICE int head(int row) const { return head_q + (row_begin + row) - query(row) * heads; }

  // Address of a row of q or o.
  template <class Element>
  CA_HOST_DEVICE Element* row_of(Operand const& t, int row) const {
    return seq.template queries<Element>(t, head(row)) + query(row) * t.row_stride;
  }

 private:
  // A sequence may be shorter than the rows that were cut into tiles.
  CA_HOST_DEVICE void set_rows(Problem const& p, TileRows const& all, int tile, int block_m) {
    int const begin = all.begin(tile, block_m);
    row_begin = begin > 0 ? begin : 0;
    int const left = seq.lens(p).q * heads - row_begin, most = block_m + (begin < 0 ? begin : 0);
    rows = left < most ? left : most;
    q_begin = query(0);
    q_end = query(rows - 1) + 1;
  }
};

using TileCoord = BasicTileCoord<DenseSeqInfo>;

}  // namespace cutlass_attn
