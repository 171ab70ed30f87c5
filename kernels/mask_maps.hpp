// Forward calls that share the map of a bool mask, such as the layers of a model: the launch before
// the kernel reads the mask once, for the first of them.
#pragma once

#include <tuple>

#include "cutlass_attn.hpp"

namespace cutlass_attn {

// All that a map depends on, except for the bytes of the mask. Calls with equal keys can share a
// map.
struct MaskMapKey {
  Variant const* variant = nullptr;  // its tile is that of the map
  int32_t device_index = 0;
  void const* stream = nullptr;  // the stream's kept counters: a handle of CUDA is used again
  Mask mask;
  int32_t batch = 0, num_heads_q = 0, num_heads_kv = 0, seqlen_q = 0, seqlen_k = 0;

  auto fields() const {
    PerLogit const& x = mask.elements;
    return std::make_tuple(variant, device_index, stream, batch, num_heads_q, num_heads_kv,
                           seqlen_q, seqlen_k, mask.window_left, mask.window_right, mask.causal,
                           mask.diagonal_shift, mask.attention_chunk, x.data, x.batch_stride,
                           x.head_stride, x.row_stride, x.key_stride);
  }
  bool operator==(MaskMapKey const& other) const { return fields() == other.fields(); }
};

// Where a program keeps maps, and how long. A map is in order with the work of one stream alone.
class MaskMaps {
 public:
  virtual ~MaskMaps() = default;
  // The workspace that has the map, or an empty one. It stays allocated until the call is enqueued.
  virtual Workspace find(MaskMapKey const& key) = 0;
  // A call was enqueued that makes the map in this workspace, which options.workspace or
  // options.allocate gave.
  virtual void keep(MaskMapKey const& key, Workspace const& workspace) = 0;
};

// attention_forward(), without the launch before the kernel where `maps` has its result. Calls that
// have no such launch, and calls of streams that are captured, do not ask `maps`: what a graph does
// must not depend on memory that others may free.
CUTLASS_ATTN_API Status attention_forward(Problem const& problem, LaunchOptions const& options,
                                          MaskMaps& maps);

// The key of a call, by which `maps` would be asked; false if it would not be.
CUTLASS_ATTN_API bool mask_map_key(Problem const& problem, LaunchOptions const& options,
                                   MaskMapKey& key);

}  // namespace cutlass_attn
