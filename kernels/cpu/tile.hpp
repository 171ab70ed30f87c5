// One work item of the CPU path: a tile of query rows, computed by one thread.
#pragma once

#include <cstddef>

#include "core/problem.hpp"

namespace cutlass_attn::cpu {

// Tiles of 144 rows keep all their state in a 1 MB L2 cache, and divide into blocks of 48, 16 and
// 8.
inline constexpr int kTileRows = 144;
inline constexpr int kTileKeys = 64;

// The rows of a tile are pairs of a query in [q_begin, q_end) and one of `heads` query heads, from
// head_begin on, that share a KV head. At most kTileRows rows; queries ascend.
struct Tile {
  int batch, kv_head, head_begin, heads, q_begin, q_end;

  int rows() const { return heads * (q_end - q_begin); }
};

// Instruction sets with a compiled tile function, slowest first.
enum class Isa { kBaseline, kAvx2, kAvx512 };

// The fastest instruction set that this processor supports.
Isa best_isa();

// Computes one tile. `scratch` is aligned to 64 bytes.
using TileFunction = void (*)(Problem const& params, Tile const& tile, float* scratch);

TileFunction tile_function(Problem const& params, Isa isa);

// Size of the scratch memory, in fp32 numbers, for a tile of up to `rows` rows.
size_t scratch_size(Problem const& params, int rows);

}  // namespace cutlass_attn::cpu
