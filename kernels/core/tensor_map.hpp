// What a copy of TMA knows of an operand: its shape and strides in memory, and the box of it that
// one instruction copies.
#pragma once

#include <cstdint>

namespace cutlass_attn {

// A 5-d view of 16-bit elements, the first dimension contiguous. A box is copied into shared memory
// in the order of the dimensions, 128 bytes a row, which TMA swizzles (tile/swizzle.hpp); what of
// it is outside the view becomes zeros.
struct TensorView {
  static constexpr int kDims = 5;
  void const* data;
  uint32_t extent[kDims];
  int64_t stride[kDims - 1];  // of dimension i + 1, in bytes
  uint32_t box[kDims];        // box[0] * 2 is 128 bytes
};

// The same as hardware has it, or on the CPU the view itself. Nobody but encode() and the copy
// looks inside.
struct alignas(64) TensorMap {
  uint64_t words[16];
};
static_assert(sizeof(TensorView) <= sizeof(TensorMap));

// On the host, for a GPU or for simt. Returns why there is no map, or null.
char const* encode(TensorView const& view, bool is_on_gpu, TensorMap& map);

}  // namespace cutlass_attn
