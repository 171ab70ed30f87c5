// Copies a warp's tiles of K and V from pages.
#pragma once

#include "core/divide.hpp"
#include "core/mask.hpp"
#include "core/sequences.hpp"
#include "tile/tile_copy.hpp"

namespace cutlass_attn::sm80 {

// Addresses of a key's rows.
template <class Kv>
struct alignas(16) KvRow {
  Kv const *k, *v;
};

// The lanes of a warp copy kRowsAtOnce rows at a time. One lane computes the address of a row and
// stores it in shared memory for the lanes that copy the row: a 64-bit division and multiplication
// in every lane would take more instructions than the copies. The page of a row is looked up one
// tile ahead, because the block table is in global memory as well.
template <class Config, class Arch>
struct KvGather {
  using Kv = typename Config::Kv;
  using Address = typename Arch::SmemAddress;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kVectors = TileK::kVectors;
  static constexpr int kElements = 2 / int(sizeof(Kv));  // per column of the tiles
  static constexpr int kRowsAtOnce = 32 / kVectors;
  static constexpr int kPasses = Config::kBlockN / kRowsAtOnce;
  static_assert(TileV::kVectors == kVectors, "a lane must copy equal rows of K and V");

  using Row = KvRow<Kv>;
  static_assert(Config::kBlockN <= 32);

  Problem const& p;
  FastDivisor const by_page;
  int const lane;
  Row* const rows;  // of this warp's next tile, in shared memory
  KeyRange keys = {0, 0};
  Kv const *k, *v;       // row 0 of the head, or the head's part of page 0
  int32_t const* pages;  // block table of the batch entry; null: not paged
  bool const is_read_once;
  bool evict_first = false;
  int page = 0, row = 0;  // of this lane's key in the tile that was looked up

  template <class Tile>
  CUTE_DEVICE KvGather(Problem const& p, FastDivisor by_page, Tile const& tile, int lane,
                       Row (&rows)[Config::kBlockN])
      : p(p),
        by_page(by_page),
        lane(lane),
        rows(rows),
        k(PagedKv<Kv>(p, tile.seq, p.k, tile.head_kv).first),
        v(PagedKv<Kv>(p, tile.seq, p.v, tile.head_kv).first),
        pages(PagedKv<Kv>(p, tile.seq, p.k, tile.head_kv).pages),
        is_read_once(tile.heads * p.num_heads_kv == p.num_heads_q &&
                     p.seq_q.seqlen * tile.heads <= Config::kBlockM) {}

  // Sets the keys that any row sees. Called first.
  CUTE_DEVICE void set_keys(KeyRange const& visible) {
    keys = visible;
    evict_first = leaves_l2();
  }

  // Looks up the pages of the tile at `key`. place() and copy() then process that tile.
  CUTE_DEVICE void look_up(int key) {
    int const wanted = key + lane % Config::kBlockN;
    int const at = wanted < keys.end ? wanted : keys.end - 1;  // clamped to a key that exists
    int const index = pages ? by_page(at) : 0;
    page = pages ? pages[index] : 0;
    row = at - index * p.kv.page_size;
  }

  CUTE_DEVICE void look_up_if(int key, int end) {
    if (key < end) look_up(key);
  }

  // Stores the row addresses of the tile in shared memory. Lanes see them after a sync_warp().
  CUTE_DEVICE void place() const {
    Arch::sync_warp();  // rows of the previous tile empty
    if (lane < Config::kBlockN) rows[lane] = {k + offset(p.k), v + offset(p.v)};
  }

  // Starts the copy of the tile to a stage. Rows that no row of Q sees are zeros: their weights are
  // 0, but 0 times NaN is NaN.
  CUTE_DEVICE void copy(int key, Address k_stage, Address v_stage) const {
    if constexpr (kElements == 1) {
      if (evict_first) return copy_rows<true>(key, k_stage, v_stage);
    }
    copy_rows<false>(key, k_stage, v_stage);
  }

 private:
  // Whether to copy with evict_first, so that K and V do not push other data out of L2. With most
  // of L2 full of other writes, H200, 1x32768 keys of 8 heads (134 MB) took 48.0 us instead of
  // 51.5, and 8x1024 (34 MB) 19.2 instead of 20.6. Not used
  //
  //   for less data: all layers of a small model may fit L2 together;
  //   for more data: lines that evict each other arrive at 4.3 TB/s instead of 4.8, and 16x8192
  //   (537 MB) takes 141 us instead of 135;
  //   for keys that another tile of rows reads, too;
  //   for an 8-bit cache, which is bound by instructions: the branch costs 2 %.
  //
  // The number of bytes is estimated from this sequence.
  CUTE_DEVICE bool leaves_l2() const {
    constexpr int64_t kMin = 32 << 20, kMax = 192 << 20;
    int64_t const columns = int64_t(p.head_dim + p.head_dim_v) * int(sizeof(Kv));
    int64_t const bytes = columns * keys.end * p.num_heads_kv * p.batch;
    return is_read_once && bytes >= kMin && bytes <= kMax;
  }
  CUTE_DEVICE int column() const { return lane % kVectors * (8 * kElements); }
  CUTE_DEVICE int64_t offset(Operand const& t) const {
    return page * t.batch_stride + row * t.row_stride;
  }
  template <bool kEvictFirst>
  CUTE_DEVICE void copy_rows(int key, Address k_stage, Address v_stage) const {
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      int const r = i * kRowsAtOnce + lane / kVectors;
      bool const inside = keys.contains(key + r);
      Row const from = rows[r];
      copy_row<TileK, kEvictFirst>(k_stage, from.k + column(), r, inside, p.head_dim);
      copy_row<TileV, kEvictFirst>(v_stage, from.v + column(), r, inside, p.head_dim_v);
    }
  }
  template <class Tile, bool kEvictFirst>
  CUTE_DEVICE void copy_row(Address stage, Kv const* source, int r, bool inside,
                            int columns) const {
    CUTE_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      int const first = column() + c * (Tile::kChunk * kElements);
      Address const to = stage + Tile::offset(r, first / kElements);
      Kv const* const from = source + c * (Tile::kChunk * kElements);
      if constexpr (kEvictFirst) {
        Arch::cp_async_evict_first(to, from, inside && first < columns);
      } else {
        Arch::cp_async(to, from, inside && first < columns);
      }
    }
  }
};

}  // namespace cutlass_attn::sm80
