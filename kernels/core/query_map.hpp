// A bool mask as the backward kernel on wgmma reads it: core/mask_map.hpp, transposed. A launch
// before the kernel makes it (sm90/backward_before_mask.hpp). For each tile of keys it says which
// query tiles see none, some or all of the keys; partial tiles have one bit per logit. Causal
// masks, windows, attention chunks and the end of the keys are included, so the kernel applies no
// other mask.
//
//   classes  (unit, key tile, query tile) TileClass
//   bits     (unit, key tile, query tile, 128 per 64 keys) uint32: one word for each thread of the
//            warpgroups that own these keys. Bit i masks accumulator i of the thread's S, whose M
//            is keys. Written for partial tiles only
//
// A unit is a query head of a batch entry. Where the mask broadcasts over batch or heads, all
// entries or heads share a unit.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

enum class TileClass : uint8_t {
  kEmpty,    // no query sees any key
  kPartial,  // some do
  kFull,     // every query sees every key
};

struct QueryMap {
  static constexpr int kQueries = 64;  // of a tile
  static constexpr int64_t kAlignment = 256;

  TileClass* classes;
  uint32_t* bits;
  int32_t key_tiles, query_tiles;
  int32_t tile_words;            // uint32 words of a tile's bits
  int32_t num_batch, num_heads;  // units; 1: shared by all

  // On the host. block_n: keys of a tile, a multiple of 64.
  static QueryMap prepare(Problem const& p, int block_n, void* memory) {
    QueryMap map = {};
    map.key_tiles = (p.seq_k.seqlen + block_n - 1) / block_n;
    map.query_tiles = (p.seq_q.seqlen + kQueries - 1) / kQueries;
    map.tile_words = block_n * kQueries / 32;
    map.num_batch = p.mask.elements.batch_stride == 0 ? 1 : p.batch;
    map.num_heads = p.mask.elements.head_stride == 0 ? 1 : p.num_heads_q;
    map.classes = static_cast<TileClass*>(memory);
    map.bits = reinterpret_cast<uint32_t*>(static_cast<char*>(memory) + map.classes_bytes());
    return map;
  }
  int64_t bytes() const { return classes_bytes() + tiles() * tile_words * int64_t(sizeof *bits); }

  // Tiles of all units.
  CA_HOST_DEVICE int64_t tiles() const {
    return int64_t(num_batch) * num_heads * key_tiles * query_tiles;
  }
  // Index of a key tile's first query tile.
  CA_HOST_DEVICE int64_t first_tile(int32_t batch, int32_t head, int32_t key_tile) const {
    int64_t const entry = num_batch == 1 ? 0 : batch;
    int64_t const unit = entry * num_heads + (num_heads == 1 ? 0 : head);
    return (unit * key_tiles + key_tile) * query_tiles;
  }

 private:
  int64_t classes_bytes() const {
    return (tiles() * int64_t(sizeof *classes) + kAlignment - 1) / kAlignment * kAlignment;
  }
};

}  // namespace cutlass_attn
