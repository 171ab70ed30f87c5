// Description of a TMA operand: its shape and strides in memory, and the box that one instruction
// copies.
#pragma once

#include <cstdint>

namespace cutlass_attn {

// A 5-d view of 16-bit elements; the first dimension is contiguous. A box is copied into shared
// memory in the order of the dimensions, in rows of 128 bytes, which TMA swizzles
// (tile/swizzle.hpp). Elements of the box outside the view become zeros.
struct TensorView {
  static constexpr int kDims = 5;
  void const* data;
  uint32_t extent[kDims];
  int64_t stride[kDims - 1];  // of dimension i + 1, in bytes
  uint32_t box[kDims];        // box[0] * 2 is 128 bytes
};

// The view in the hardware's format; on the CPU, the TensorView itself. Only encode() and the
// copies read it.
struct alignas(64) TensorMap {
  uint64_t words[16];
};
static_assert(sizeof(TensorView) <= sizeof(TensorMap));

// Called on the host, for a GPU or for simt. Returns the reason for a failure, or null.
char const* encode(TensorView const& view, bool is_on_gpu, TensorMap& map);

}  // namespace cutlass_attn
