// Tiles of calls with products in 8 bits: see core/quantize.hpp.
#pragma once

#include "cpu/tile.hpp"

namespace cutlass_attn::cpu {

TileFunction quantized_tile_function(Problem const& params, Isa isa);

// How many fp32 numbers of scratch memory a tile of up to `rows` rows needs.
size_t quantized_scratch_size(Problem const& params, int rows);

}  // namespace cutlass_attn::cpu
