// Copies of a warp's own tiles of K and V, a row from wherever a block table says it is.
#pragma once

#include "core/divide.hpp"
#include "core/sequences.hpp"
#include "tile/tile_copy.hpp"

namespace cutlass_attn::sm80 {

// The lanes of a warp copy kRowsAtOnce rows side by side. Which page a row is in is looked up a
// tile before the row is copied: the table lies in memory that is far away, too.
template <class Config, class Arch>
struct KvGather {
  using Kv = typename Config::Kv;
  using Address = typename Arch::SmemAddress;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kVectors = TileK::kVectors;
  static constexpr int kElements = 2 / int(sizeof(Kv));  // of a column of the tiles
  static constexpr int kRowsAtOnce = 32 / kVectors;
  static constexpr int kPasses = Config::kBlockN / kRowsAtOnce;
  static_assert(TileV::kVectors == kVectors, "so that a lane copies the same rows of both");

  Problem const& p;
  FastDivisor const by_page;
  int const lane, seqlen_k;
  Kv const *k, *v;       // row 0 of the head, or of its part of page 0; this lane's column
  int32_t const* pages;  // of the batch entry; null: there are none
  int page[kPasses], row[kPasses];  // where the rows of the next tile are

  template <class Tile>
  CUTE_DEVICE KvGather(Problem const& p, FastDivisor by_page, Tile const& tile, int seqlen_k,
                       int lane)
      : p(p),
        by_page(by_page),
        lane(lane),
        seqlen_k(seqlen_k),
        k(PagedKv<Kv>(p, tile.seq, p.k, tile.head_kv).first + column()),
        v(PagedKv<Kv>(p, tile.seq, p.v, tile.head_kv).first + column()),
        pages(PagedKv<Kv>(p, tile.seq, p.k, tile.head_kv).pages) {}

  // Finds out where the rows are of the tile that begins at `key`, which copy() is for then.
  CUTE_DEVICE void look_up(int key) {
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      int const wanted = key + i * kRowsAtOnce + lane / kVectors;
      int const at = wanted < seqlen_k ? wanted : seqlen_k - 1;  // any that is there
      int const index = pages ? by_page(at) : 0;
      page[i] = pages ? pages[index] : 0;
      row[i] = at - index * p.kv.page_size;
    }
  }

  CUTE_DEVICE void look_up_if(int key, int end) {
    if (key < end) look_up(key);
  }

  // Starts to copy that tile to a stage's buffers; rows beyond the last are zeros.
  CUTE_DEVICE void copy(int key, Address k_stage, Address v_stage) const {
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      int const r = i * kRowsAtOnce + lane / kVectors;
      bool const inside = key + r < seqlen_k;
      copy_row<TileK>(k_stage, k + offset(p.k, i), r, inside, p.head_dim);
      copy_row<TileV>(v_stage, v + offset(p.v, i), r, inside, p.head_dim_v);
    }
  }

 private:
  CUTE_DEVICE int column() const { return lane % kVectors * (8 * kElements); }
  CUTE_DEVICE int64_t offset(Operand const& t, int i) const {
    return page[i] * t.batch_stride + row[i] * t.row_stride;
  }
  template <class Tile>
  CUTE_DEVICE void copy_row(Address stage, Kv const* source, int r, bool inside,
                            int columns) const {
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      int const first = column() + c * (Tile::kChunk * kElements);
      Arch::async_copy(stage + Tile::offset(r, first / kElements),
                       source + c * (Tile::kChunk * kElements), inside && first < columns);
    }
  }
};

}  // namespace cutlass_attn::sm80
