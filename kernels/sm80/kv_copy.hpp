// Copies tiles of K and V into their buffers, in the order of the loop.
#pragma once

#include "core/opaque.hpp"
#include "core/sequences.hpp"
#include "sm80/config.hpp"
#include "sm80/paged_rows.hpp"
#include "tile/tile_copy.hpp"

namespace cutlass_attn::sm80 {

// IsAligned: bool, whether all operands can be copied 16 bytes at a time, or std::true_type.
// kIsReversed: tiles go from last to first. quantized/kv_copy.hpp specialises it for K in int8.
template <class Config, class Arch, class IsAligned, bool kIsReversed,
          class ElementK = typename Config::ElementK>
struct KvCopy {
  using Kv = typename Config::Kv;
  using Address = typename Arch::SmemAddress;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using Coord = typename Config::Coord;
  using RowsK = typename Config::RowsK;
  using RowsV = typename Config::RowsV;
  using CopyK = TileCopy<Arch, Kv, TileK, Config::kThreads>;
  using CopyV = TileCopy<Arch, Kv, TileV, Config::kThreads>;
  static constexpr int kN = Config::kBlockN;
  static constexpr int kStep = kIsReversed ? -kN : kN;  // to the next tile
  static_assert(!Config::kIsPaged || int(TileK::kVectors) == int(TileV::kVectors),
                "a warp must copy equal rows of K and V");
  // Keys per row of the tile. With more than one, tiles are always full, with permuted keys.
  template <class Copy>
  static constexpr int kKeysOfRow = kN / Copy::Tile::kRows;

  Problem const& p;
  typename Config::SharedStorage& shared;
  TileRange const& range;
  IsAligned const is_aligned;
  int const thread;
  Kv const* k_source;  // this thread's first address in the next tile to be copied
  Kv const* v_source;
  Address const k_target;  // this thread's first address in K's stage 0
  PagedRows<Config, Arch, CopyK, kIsReversed> paged_rows;  // used with pages

  // `tile` is also stored in shared.block.tile before the next barrier.
  CUTE_DEVICE KvCopy(Problem const& p, Coord const& tile, TileRange const& range, int first_key,
                     IsAligned is_aligned, typename Config::SharedStorage& shared)
      : p(p),
        shared(shared),
        range(range),
        is_aligned(is_aligned),
        thread(Arch::thread()),
        k_source(source<CopyK, RowsK>(p, p.k, tile, first_key, thread)),
        v_source(source<CopyV, RowsV>(p, p.v, tile, first_key, thread)),
        k_target(Arch::smem_address(shared.k) + CopyK::offset(thread)),
        paged_rows{p, shared.block, thread} {}

  // Called before the first copy, once shared.block is full.
  CUTE_DEVICE void begin(int first_key) {
    if constexpr (Config::kIsPaged) {
      paged_rows.look_up(first_key, seqlen_k());
      paged_rows.place(shared.block.k, p.k, first_key, seqlen_k());
    }
  }

  // Starts the copy of the tile that begins at `key`. It follows the tile of the previous call, and
  // may be beyond the last. Commits one group. If rows are not aligned, the copy is complete on
  // return.
  CUTE_DEVICE void copy_k(int key, int stage) {
    if (!is_aligned) {
      char const* const smem = reinterpret_cast<char const*>(shared.k);
      return copy_elements<CopyK, RowsK>(smem + stage * Config::kKStride, p.k, key,
                                         Config::k_columns(p));
    }
    Address const target = k_target + stage * Config::kKStride;
    if constexpr (Config::kHasMask) {
      copy_at<CopyK, false>(target, shared.block.k, p.k.row_stride, key, Config::k_columns(p));
    } else if constexpr (Config::kIsPaged) {
      gather<CopyK, false>(target, key, p.head_dim);
      paged_rows.place(shared.block.v, p.v, key, seqlen_k());
      paged_rows.look_up(key + kStep, seqlen_k());
    } else {
      copy<CopyK, false>(target, k_source, p.k.row_stride, key, Config::k_columns(p));
    }
  }

  // Starts the copy of a tile's mask bits, in the group of the next copy_k() or copy_v(). tile: as
  // in MapTilesAhead.
  CUTE_DEVICE void copy_bits(int tile, int stage) {
    if constexpr (Config::kHasMask) {
      bool const is_partial = tile >= 0 && !(tile & 1);
      int const own = opaque(thread);
      if (!is_partial || own >= Config::kBlockM) return;
      static_assert(Config::kBlockM <= Config::kThreads);
      auto const* const from = shared.block.all_bits + int64_t(tile >> 1) * kBitsOfTile;
      Arch::cp_async(Arch::smem_address(shared.block.bits[stage][own]),
                     from + own * MaskMap::kLanes, true);
    }
  }

  CUTE_DEVICE void copy_v(int key, int stage) {
    if (!is_aligned) {
      char const* const smem = reinterpret_cast<char const*>(shared.v);
      return copy_elements<CopyV, RowsV>(smem + stage * Config::kVStride, p.v, key, p.head_dim_v);
    }
    Address const target = v_target() + stage * Config::kVStride;
    if constexpr (Config::kHasMask) {
      copy_at<CopyV, true>(target, shared.block.v, p.v.row_stride, key, p.head_dim_v);
    } else if constexpr (Config::kIsPaged) {
      gather<CopyV, true>(target, key, p.head_dim_v);
      paged_rows.place(shared.block.k, p.k, key + kStep, seqlen_k());
    } else {
      copy<CopyV, true>(target, v_source, p.v.row_stride, key, p.head_dim_v);
    }
  }

 protected:
  // If rows are as long as K's, this thread's offset is that in K.
  CUTE_DEVICE Address v_target() const {
    Address target = k_target + Config::kVOffset;
    if constexpr (TileK::kColumns != TileV::kColumns) {
      target += CopyV::offset(thread) - CopyK::offset(thread);
    }
    return target;
  }

  // Whether the tile at `key` exists. Only valid for tiles in loop order.
  CUTE_DEVICE bool has(int key) const {
    if constexpr (Config::kHasMask) return key >= 0;
    return kIsReversed ? key >= range.begin : key < range.end;
  }

  CUTE_DEVICE int seqlen_k() const { return shared.block.tile.seq.lens(p).k; }

 private:
  static constexpr int kBitsOfTile = Config::kBlockM * MaskMap::kLanes;  // in words

  // Whether all rows of the tile at `key` are copied. Rows of K are copied if they exist, rows of V
  // if a row of Q sees them. The other rows are zeros: their weights are 0, but 0 times NaN is NaN.
  template <class Copy, bool kIsV>
  CUTE_DEVICE bool is_whole(int key) const {
    if constexpr (kIsV && kKeysOfRow<Copy> == 1 && !Config::kHasMask) return range.is_full(key);
    return rows_left<Copy>(key) >= Copy::Tile::kRows;
  }
  // Predicate of the rows to copy, for a tile that is not whole.
  template <bool kIsV>
  CUTE_DEVICE auto copied_rows(int key) const {
    if constexpr (kIsV && !Config::kHasMask) {
      // opaque: without it, d256 64x64x4 with pages and ALiBi has 8 bytes more of local memory.
      return [&keys = shared.block.keys, key](int r) {
        return key + r >= opaque(keys.first) && key + r < keys.end;
      };
    } else {
      return [left = seqlen_k() - key](int r) { return r < left; };
    }
  }

  // Rows from the tile at `key` to the end.
  template <class Copy>
  CUTE_DEVICE int rows_left(int key) const {
    return kKeysOfRow<Copy> == 1 ? seqlen_k() - key : Copy::Tile::kRows;
  }

  // Address of a thread's first vector of the tile at `key`.
  template <class Copy, class Rows>
  CUTE_DEVICE static Kv const* source(Problem const& p, Operand const& t, Coord const& tile,
                                      int key, int thread) {
    int const row = key / kKeysOfRow<Copy> + Copy::row(thread);
    return Rows(p, tile.seq, t, tile.head_kv).row(row) + Copy::column(thread);
  }

  // Copies a tile and advances `source`. opaque: without it, d128 128x64x4 has 8 bytes of local
  // memory for this thread's place in a tile. In other tiles keeping the place saves instructions.
  template <class Copy, bool kIsV>
  CUTE_DEVICE void copy(Address target, Kv const*& source, int64_t row_stride, int key,
                        int columns) const {
    copy_from<Copy, kIsV>(target, source, row_stride, key, columns);
    source += (kIsReversed ? -Copy::Tile::kRows : Copy::Tile::kRows) * row_stride;
  }
  // Copies the tile at `key`, independent of the previous one. first: row 0.
  template <class Copy, bool kIsV>
  CUTE_DEVICE void copy_at(Address target, Kv const* first, int64_t row_stride, int key,
                           int columns) const {
    int const own = opaque(thread);
    copy_from<Copy, kIsV>(target, first + (key + Copy::row(own)) * row_stride + Copy::column(own),
                          row_stride, key, columns);
  }
  template <class Copy, bool kIsV>
  CUTE_DEVICE void copy_from(Address target, Kv const* source, int64_t row_stride, int key,
                             int columns) const {
    int const own = Config::kIsTight ? opaque(thread) : thread;
    if (is_whole<Copy, kIsV>(key) && has(key)) {
      Copy::load_whole(target, source, row_stride, columns, own);
    } else if (has(key)) {
      Copy::load(target, source, row_stride, copied_rows<kIsV>(key), columns, own);
    }
    Arch::cp_async_commit_group();
  }

  // Copies rows from the addresses that paged_rows stored.
  template <class Copy, bool kIsV>
  CUTE_DEVICE void gather(Address target, int key, int columns) const {
    auto const row = [&](int r) { return shared.block.rows[r] + Copy::column(thread); };
    Arch::sync_warp();  // rows full
    if (is_whole<Copy, kIsV>(key) && has(key)) {
      Copy::load_rows(target, row, [](int) { return true; }, columns, thread);
    } else if (has(key)) {
      Copy::load_rows(target, row, copied_rows<kIsV>(key), columns, thread);
    }
    Arch::cp_async_commit_group();
  }

  // Copies element by element to the tile at `smem`. opaque: without it, the compiler keeps this
  // thread's place in registers through the loop, and spills.
  template <class Copy, class Rows>
  CUTE_DEVICE void copy_elements(char const* smem, Operand const& t, int key, int columns) const {
    if (!has(key)) return;
    int const own = opaque(thread);
    Copy::load_elements(Arch::smem_address(smem) + Copy::offset(own),
                        source<Copy, Rows>(p, t, shared.block.tile, key, own), t.row_stride,
                        rows_left<Copy>(key), columns, own);
  }
};

}  // namespace cutlass_attn::sm80
