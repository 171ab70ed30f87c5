// The map of a bool mask, as tensor-core kernels read it. A launch before the kernel makes the map
// from the mask's bytes (tile/mask_map.hpp). For each tile of rows it has the class of every key
// tile: empty, partial or full. For partial tiles it has a bit per logit. Causal masks, windows,
// attention chunks and the end of the keys are included, so the kernel applies no other mask.
//
//   words   (unit, row tile, words) MaskWord   bit t of word w belongs to key tile 32 w + t
//   bits    (unit, row tile, key tile, row, 4) uint32   one word per lane of a quad: bit j is key
//           FragmentPlace::column(j) of the tile. Written for partial tiles only
//
// A unit is a batch entry and a group of heads that share tiles. If the mask broadcasts over the
// batch or the heads, all entries or heads share one unit.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/problem.hpp"
#include "core/scheduler.hpp"

namespace cutlass_attn {

// 32 key tiles of a tile of rows.
struct alignas(8) MaskWord {
  uint32_t any;  // tiles in which some row sees some key
  uint32_t all;  // tiles in which every row sees every key
};

struct MaskMap {
  static constexpr int kLanes = 4;
  static constexpr int kThreads = 256;  // per block of the launch that makes the map
  static constexpr int64_t kAlignment = 256;

  MaskWord* words;
  uint32_t* bits;
  int32_t key_tiles, row_tiles, block_m, block_n;
  int32_t num_words;          // per tile of rows
  int32_t num_batch, groups;  // numbers of units; 1: shared

  // On the host, for kernels with tiles of block_m rows and block_n keys.
  static MaskMap prepare(Problem const& p, TileScheduler const& scheduler, int block_m, int block_n,
                         void* memory) {
    MaskMap map = {};
    map.block_m = block_m;
    map.block_n = block_n;
    map.key_tiles = (p.seq_k.seqlen + block_n - 1) / block_n;
    map.row_tiles = scheduler.rows.tiles;
    map.num_words = (map.key_tiles + 31) / 32;
    map.num_batch = p.mask.elements.batch_stride == 0 ? 1 : p.batch;
    map.groups = p.mask.elements.head_stride == 0 ? 1 : scheduler.groups;
    map.words = static_cast<MaskWord*>(memory);
    map.bits = reinterpret_cast<uint32_t*>(static_cast<char*>(memory) + map.words_bytes());
    return map;
  }
  int64_t bytes() const {
    return words_bytes() + rows() * key_tiles * block_m * kLanes * int64_t(sizeof(uint32_t));
  }
  // Shared memory of a block of that launch: per warp, the bits of a key tile and its class.
  CA_HOST_DEVICE static constexpr int32_t smem_bytes(int32_t block_m) {
    return kThreads / 32 * (block_m * kLanes + 1) * int32_t(sizeof(uint32_t));
  }

  // Number of row tiles of all units.
  CA_HOST_DEVICE int64_t rows() const { return int64_t(num_batch) * groups * row_tiles; }

  // Index of a tile of rows among them.
  template <class Coord>
  CA_HOST_DEVICE int64_t row_of(Coord const& tile, TileScheduler const& scheduler) const {
    int32_t const batch = num_batch == 1 ? 0 : tile.seq.batch;
    int32_t const group = groups == 1 ? 0 : tile.head_q / tile.heads;
    int32_t const row_tile = (tile.row_begin + scheduler.rows.lacks) / block_m;
    return (int64_t(batch) * groups + group) * row_tiles + row_tile;
  }
  // The inverse: the tile, in the first batch entry and heads that share the unit.
  CA_HOST_DEVICE TileCoord tile_of(int64_t row, Problem const& p,
                                   TileScheduler const& scheduler) const {
    int32_t const unit = int32_t(row / row_tiles), row_tile = int32_t(row - unit * row_tiles);
    int32_t const batch = unit / groups, group = unit - batch * groups;
    return TileCoord(p, scheduler, block_m,
                     {batch * scheduler.groups + group, scheduler.rows.tiles - 1 - row_tile});
  }

  CA_HOST_DEVICE MaskWord* words_of(int64_t row) const { return words + row * num_words; }
  // Bits of the first key tile. A key tile has block_m rows of kLanes words.
  CA_HOST_DEVICE uint32_t* bits_of(int64_t row) const {
    return bits + row * key_tiles * block_m * kLanes;
  }

 private:
  int64_t words_bytes() const {
    int64_t const bytes = rows() * num_words * int64_t(sizeof(MaskWord));
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
};

}  // namespace cutlass_attn
