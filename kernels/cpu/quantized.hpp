// Tiles of calls with products in 8 bits (core/quantize.hpp).
#pragma once

#include "core/status.hpp"
#include "cpu/tile.hpp"
#include "cutlass_attn.hpp"

namespace cutlass_attn::cpu {

TileFunction quantized_tile_function(Problem const& params, Isa isa);

// Size of the scratch memory, in fp32 numbers, for a tile of up to `rows` rows.
size_t quantized_scratch_size(Problem const& params, int rows);

// Predicts the error of each query head (core/predict.hpp) into errors (batch, num_heads_q): the
// error of this kernel, or of the kernel on a GPU.
Status predict_errors(Problem const& params, Isa isa, RunOptions const& options, bool is_gpu,
                      float* errors);

}  // namespace cutlass_attn::cpu
