// Tiles of 64 keys that are rounded to 8 bits: their position in the workspace, and the block that
// rounds them.
//
//   DenseKeyTiles    every batch entry has an equal number of tiles
//   VarlenKeyTiles   packed keys, or entries with fewer keys than rows. The workspace has
//                    slots for tiles; the host computes an upper bound of their number
//                    (core/packed_tiles.hpp). Tiles are counted from the first key of a sequence
#pragma once

#include "core/divide.hpp"
#include "core/forward_params.hpp"
#include "core/quantize.hpp"
#include "core/varlen_params.hpp"

namespace cutlass_attn {

// Tiles [first, end) of one KV head of a batch entry, which one block rounds.
template <class Head>
struct QuantizedTiles {
  Head head;
  int32_t first, end;
};

// Each block computes the shift of its head, and waits for the first of its tiles. To share that
// cost, a block takes up to eight tiles, as long as there are 16 blocks per SM.
inline int32_t tiles_of_a_block(int64_t all_tiles, DeviceLimits const& device) {
  int64_t const blocks = 16 * int64_t(device.num_sms), each = 8;
  return int32_t(all_tiles < blocks * each ? 1 + (all_tiles - 1) / blocks : each);
}

CA_HOST_DEVICE int32_t tiles_of_keys(int32_t keys) {
  return (keys + quantize::kTileKeys - 1) / quantize::kTileKeys;
}

// The number of tiles of a head is a multiple of kMultiple. The last ones may have no keys.
template <int kMultiple>
struct BasicDenseKeyTiles {
  using Params = ForwardParams;
  using Head = int32_t;  // KV head of a batch entry, counted over all entries
  static constexpr bool kMayBeNone = false;

  int32_t tiles;  // per head
  int32_t heads;
  // Tiles per rounding block; rounding blocks per head.
  int32_t block_tiles, head_blocks;
  FastDivisor by_blocks, by_heads_kv;

  static int64_t heads_of(Problem const& p) { return int64_t(p.batch) * p.num_heads_kv; }
  static int64_t tiles_of(Problem const& p) { return heads_of(p) * tiles_of_head(p); }
  static int32_t tiles_of_head(Problem const& p) {
    return (tiles_of_keys(p.seq_k.seqlen) + kMultiple - 1) / kMultiple * kMultiple;
  }

  BasicDenseKeyTiles() = default;
  BasicDenseKeyTiles(Problem const& p, DeviceLimits const& device)
      : tiles(tiles_of_head(p)),
        heads(p.batch * p.num_heads_kv),
        block_tiles(tiles_of_a_block(int64_t(heads) * tiles, device)),
        head_blocks((tiles + block_tiles - 1) / block_tiles),
        by_blocks(head_blocks > 0 ? head_blocks : 1),
        by_heads_kv(p.num_heads_kv > 0 ? p.num_heads_kv : 1) {}

  // An operand in the workspace, with of_tile elements per tile and of_row elements per row.
  Operand placed(Problem const& p, void* data, DType dtype, int64_t of_tile, int64_t of_row) const {
    int64_t const of_head = tiles * of_tile;
    return {data, p.num_heads_kv * of_head, of_head, of_row, dtype};
  }

  // In a kernel.
  CA_HOST_DEVICE Head head_of(Problem const& p, DenseSeqInfo const& seq, int32_t head_kv) const {
    return seq.batch * p.num_heads_kv + head_kv;
  }
  template <class Arch>
  CA_HOST_DEVICE QuantizedTiles<Head> of_block(Problem const&, int32_t block) const {
    int32_t const head = by_blocks(block), first = (block - head * head_blocks) * block_tiles;
    int32_t const end = first + block_tiles;
    return {head, first, end < tiles ? end : tiles};
  }
  // Index of a tile in the workspace; index of a head among those with a shift.
  CA_HOST_DEVICE int64_t number(Head head, int32_t tile) const {
    return int64_t(head) * tiles + tile;
  }
  CA_HOST_DEVICE int64_t number(Problem const&, Head head) const { return head; }
  // The rows to be rounded, in the call's operand.
  template <class Element>
  CA_HOST_DEVICE Element const* source(Problem const& p, Operand const& t, Head head) const {
    int const batch = by_heads_kv(head);
    int const head_kv = head - batch * p.num_heads_kv;
    return static_cast<Element const*>(t.data) + batch * t.batch_stride + head_kv * t.head_stride;
  }
  CA_HOST_DEVICE int32_t seqlen(Problem const& p, Head) const { return p.seq_k.seqlen; }
};

using DenseKeyTiles = BasicDenseKeyTiles<1>;

struct VarlenKeyTiles {
  using Params = VarlenParams;
  struct Head {
    VarlenSeqInfo seq;
    int32_t head_kv;
    int32_t slot;  // slot of the sequence's first tile
  };
  static constexpr bool kMayBeNone = true;

  int32_t slots;  // per KV head, for tiles of all sequences
  int32_t heads;  // KV heads
  // Tiles per rounding block; slots for rounding blocks per head.
  int32_t block_tiles, head_blocks;
  FastDivisor by_blocks, by_blocks_each;

  static int64_t heads_of(Problem const& p) { return int64_t(p.batch) * p.num_heads_kv; }
  static int64_t tiles_of(Problem const& p) { return slots_of(p, 1) * p.num_heads_kv; }

  VarlenKeyTiles() = default;
  VarlenKeyTiles(Problem const& p, DeviceLimits const& device)
      : slots(int32_t(slots_of(p, 1))),
        heads(p.num_heads_kv),
        block_tiles(tiles_of_a_block(int64_t(heads) * slots, device)),
        head_blocks(int32_t(slots_of(p, block_tiles))),
        by_blocks(head_blocks > 0 ? head_blocks : 1),
        by_blocks_each(blocks_each(p) > 0 ? blocks_each(p) : 1) {}

  // Strides as if each tile were a batch entry.
  Operand placed(Problem const&, void* data, DType dtype, int64_t of_tile, int64_t of_row) const {
    return {data, of_tile, slots * of_tile, of_row, dtype};
  }

  // Slot of a sequence's first tile.
  CA_HOST_DEVICE static int32_t first_slot(Problem const& p, VarlenSeqInfo const& seq) {
    if (p.seq_k.cu_seqlens) return packed(p, 1).first_slot(seq.batch);
    return seq.batch * tiles_of_keys(p.seq_k.seqlen);
  }

  // In a kernel; all lanes of a warp call of_block().
  CA_HOST_DEVICE Head head_of(Problem const& p, VarlenSeqInfo const& seq, int32_t head_kv) const {
    return {seq, head_kv, first_slot(p, seq)};
  }
  template <class Arch>
  CA_HOST_DEVICE QuantizedTiles<Head> of_block(Problem const& p, int32_t block) const {
    int32_t const head_kv = by_blocks(block), slot = block - head_kv * head_blocks;
    int32_t batch = 0, first = 0;
    if (p.seq_k.cu_seqlens) {
      PackedTiles const blocks = packed(p, block_tiles);
      batch = blocks.template entry_of<Arch>(slot, p.batch);
      first = (slot - blocks.first_slot(batch)) * block_tiles;
    } else {
      batch = by_blocks_each(slot);
      first = (slot - batch * blocks_each(p)) * block_tiles;
    }
    Head const head = head_of(p, VarlenSeqInfo(p, batch), head_kv);
    int32_t const end = first + block_tiles, tiles = tiles_of_keys(head.seq.seqlens.k);
    return {head, first, first < 0 ? first : end < tiles ? end : tiles};
  }
  CA_HOST_DEVICE int64_t number(Head const& head, int32_t tile) const {
    return int64_t(head.head_kv) * slots + head.slot + tile;
  }
  CA_HOST_DEVICE int64_t number(Problem const& p, Head const& head) const {
    return int64_t(head.seq.batch) * p.num_heads_kv + head.head_kv;
  }
  template <class Element>
  CA_HOST_DEVICE Element const* source(Problem const&, Operand const& t, Head const& head) const {
    return head.seq.template keys<Element const>(t, head.head_kv);
  }
  CA_HOST_DEVICE int32_t seqlen(Problem const&, Head const& head) const {
    return head.seq.seqlens.k;
  }

 private:
  // Groups of `tiles` tiles of 64 keys.
  CA_HOST_DEVICE static PackedTiles packed(Problem const& p, int32_t tiles) {
    return {p.seq_k.cu_seqlens, 1, tiles * quantize::kTileKeys};
  }
  static int64_t slots_of(Problem const& p, int32_t tiles) {
    if (p.seq_k.cu_seqlens) {
      return PackedTiles::slots(p.seq_k.total, 1, tiles * quantize::kTileKeys, p.batch);
    }
    return int64_t(p.batch) * ((tiles_of_keys(p.seq_k.seqlen) + tiles - 1) / tiles);
  }
  CA_HOST_DEVICE int32_t blocks_each(Problem const& p) const {
    return (tiles_of_keys(p.seq_k.seqlen) + block_tiles - 1) / block_tiles;
  }
};

// Rows of K or V in 8 bits, at the position that VarlenKeyTiles chose.
template <class Element>
struct TiledKv {
  Element const* first;
  int64_t row_stride;

  CA_HOST_DEVICE TiledKv(Problem const& p, VarlenSeqInfo const& seq, Operand const& t, int head)
      : first(static_cast<Element const*>(t.data) +
              VarlenKeyTiles::first_slot(p, seq) * t.batch_stride + head * t.head_stride),
        row_stride(t.row_stride) {}

  CA_HOST_DEVICE Element const* row(int row) const { return first + row * row_stride; }
};

}  // namespace cutlass_attn
