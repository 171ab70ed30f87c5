// CUTLASS_ATTN_CUDA, 0 or 1, comes from CMake.
#include "runtime/kept.hpp"

#if CUTLASS_ATTN_CUDA
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "core/key_splits.hpp"
#include "runtime/device.hpp"
#endif

namespace cutlass_attn {

#if CUTLASS_ATTN_CUDA

namespace {

// Two threads may use one stream. Launches that share kept memory run one after the other. A memset
// and a launch are two driver calls, and another thread's launch may come between them. So a call
// with more tiles than a stream has counters needs memory of its own. It has that, because its
// partial results do not fit into kept data.
static_assert((Kept::kZerosBytes / 4 + 1) * 2 * 4 * KeySplits::partial_floats(8, 64) >
              Kept::kDataBytes);

constexpr unsigned long long kDefaultStream = ~0ull;  // not the id of any stream

// Kept memory of one GPU. Nothing is evicted or freed, so that no work in flight can lose its
// memory:
//
// - A kernel that was enqueued long ago may not have run yet. Only an event could tell, which every
//   call would have to record: one more driver call. The stream itself cannot be asked, since its
//   owner may have destroyed it.
// - A call that is captured gets nothing here but takes its memory from the caller's allocator. So
//   a graph may be replayed on any stream at any time without meeting the counters of another call.
//
// A stream beyond the first Kept::kStreams takes its memory from the caller's allocator as well.
struct Gpu {
  char* slots = nullptr;
  std::map<unsigned long long, Workspace> streams;  // by id: a handle is used again, an id is not
  int data_streams = 0;                             // those that data was allocated for, or failed
  int64_t bytes = 0;
};

struct State {
  std::mutex mutex;
  std::map<int, Gpu> gpus;  // by CUDA ordinal
};

State& state() {
  static State& all = *new State;  // never destroyed: threads may make calls while a program exits
  return all;
}

bool fails(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error != cudaSuccess;
}

char* allocate(Gpu& gpu, int64_t bytes) {
  RelaxedCapture const relaxed;
  void* data = nullptr;
  if (!relaxed.status().ok() || fails(cudaMalloc(&data, size_t(bytes)))) return nullptr;
  gpu.bytes += bytes;
  return static_cast<char*>(data);
}

// A slot for a stream's first call, or an empty workspace.
Workspace next_slot(Gpu& gpu, cudaStream_t stream) {
  if (gpu.streams.size() == Kept::kStreams) return {};
  if (gpu.slots == nullptr) gpu.slots = allocate(gpu, Kept::kStreams * Kept::kSlotBytes);
  if (gpu.slots == nullptr) return {};
  char* const zeros = gpu.slots + int64_t(gpu.streams.size()) * Kept::kSlotBytes;
  if (fails(cudaMemsetAsync(zeros, 0, size_t(Kept::kZerosBytes), stream))) return {};
  return {zeros + Kept::kZerosBytes, Kept::kSlotDataBytes, zeros, Kept::kZerosBytes};
}

}  // namespace

Workspace kept_workspace(int device_index, void* stream_handle, int64_t bytes) {
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  if (stream == cudaStreamPerThread) return {};  // another one in every thread
  unsigned long long id = kDefaultStream;
  if (stream != nullptr) {  // that of the device's primary context, which cannot be captured
    auto capture = cudaStreamCaptureStatusNone;
    if (fails(cudaStreamIsCapturing(stream, &capture)) || capture != cudaStreamCaptureStatusNone) {
      return {};
    }
    if (fails(cudaStreamGetId(stream, &id))) return {};
  }

  std::lock_guard<std::mutex> const locked(state().mutex);
  Gpu& gpu = state().gpus[device_index];
  auto found = gpu.streams.find(id);
  if (found == gpu.streams.end()) {
    Workspace const slot = next_slot(gpu, stream);
    if (slot.zeros == nullptr) return {};
    found = gpu.streams.emplace(id, slot).first;
  }
  Workspace& kept = found->second;
  if (bytes > kept.bytes && bytes <= Kept::kDataBytes && gpu.data_streams < Kept::kDataStreams) {
    ++gpu.data_streams;
    if (char* const data = allocate(gpu, Kept::kDataBytes)) {
      kept.data = data;
      kept.bytes = Kept::kDataBytes;
    }
  }
  return kept;
}

int64_t kept_bytes(int device_index) {
  std::lock_guard<std::mutex> const locked(state().mutex);
  auto const found = state().gpus.find(device_index);
  return found == state().gpus.end() ? 0 : found->second.bytes;
}

#else

Workspace kept_workspace(int, void*, int64_t) { return {}; }

int64_t kept_bytes(int) { return 0; }

#endif

}  // namespace cutlass_attn
