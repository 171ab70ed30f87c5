// Memory on a GPU that the library keeps for the streams of its calls. An allocation takes half as
// long as a launch, and counters that kernels leave at 0 need no memset.
#pragma once

#include "cutlass_attn.hpp"

namespace cutlass_attn {

// Of each GPU: a slot with counters and a few bytes of data for each of the first streams, and data
// for the first streams whose calls need more than that. 18 MB in all.
struct Kept {
  static constexpr int kStreams = 256;
  static constexpr int64_t kSlotBytes = 8 << 10;
  static constexpr int64_t kSlotDataBytes = 256;
  static constexpr int64_t kZerosBytes = kSlotBytes - kSlotDataBytes;  // 1984 counters
  static constexpr int kDataStreams = 4;
  static constexpr int64_t kDataBytes = 4 << 20;
  static constexpr int64_t kMaxBytes = kStreams * kSlotBytes + kDataStreams * kDataBytes;
};

// The memory kept for a stream. Kernels of a stream run in order, so they share it. Its data may
// have fewer than `bytes`. Empty if all slots are taken, the GPU is out of memory, or the stream is
// being captured. The device is current already.
Workspace kept_workspace(int device_index, void* stream, int64_t bytes);

}  // namespace cutlass_attn
