// A bool mask as the backward kernel on wgmma reads it: the map of core/mask_map.hpp the other way
// round. A launch before the kernel makes it (sm90/backward_before_mask.hpp): for each tile of
// keys, which tiles of queries see any of them, and which all of them; for the tiles in between, a
// bit for each logit. Causal masks, windows, attention chunks and the end of the keys are part of
// it, so that the kernel applies nothing else.
//
//   classes  (unit, key tile, query tile) TileClass
//   bits     (unit, key tile, query tile, 128 for every 64 keys) uint32   a word for each thread of
//            the warpgroups with these keys: bit i masks accumulator i of its S, which has keys in
//            rows. Only partial tiles have them
//
// A unit is a query head of a batch entry. Where the mask broadcasts over the batch or the heads,
// all entries or heads share one.
#pragma once

#include <cstdint>

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

enum class TileClass : uint8_t {
  kEmpty,    // no query sees any key
  kPartial,  // in between
  kFull,     // each query sees each key
};

struct QueryMap {
  static constexpr int kQueries = 64;  // of a tile
  static constexpr int64_t kAlignment = 256;

  TileClass* classes;
  uint32_t* bits;
  int32_t key_tiles, query_tiles;
  int32_t tile_words;            // of the bits of a tile
  int32_t num_batch, num_heads;  // of units; 1: shared

  // On the host, for tiles of block_n keys, a multiple of 64.
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

  // Of all units.
  CA_HOST_DEVICE int64_t tiles() const {
    return int64_t(num_batch) * num_heads * key_tiles * query_tiles;
  }
  // The number of a key tile's first query tile among them.
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
