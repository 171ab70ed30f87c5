// Tiles of calls with products in 8 bits: see core/quantize.hpp.
#pragma once

#include "core/status.hpp"
#include "cpu/tile.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn::cpu {

TileFunction quantized_tile_function(Problem const& params, Isa isa);

// How many fp32 numbers of scratch memory a tile of up to `rows` rows needs.
size_t quantized_scratch_size(Problem const& params, int rows);

// What core/predict.hpp predicts of each query head: errors (batch, num_heads_q).
Status predict_errors(Problem const& params, Isa isa, RunOptions const& options, float* errors);

}  // namespace cutlass_attn::cpu
