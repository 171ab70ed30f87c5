// A CUDA runtime without a GPU. The linker's --wrap redirects calls of the library to these
// functions (listed in CMakeLists.txt). Kernels do not run. Included by one test program only.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/launch.hpp"

namespace fake {

struct Stream {
  unsigned long long id;
  bool is_captured = false;
};

inline Stream* new_stream() {
  static std::atomic<unsigned long long> count{100};
  return new Stream{count++};
}

struct Call {
  std::string name;
  void* address;
  int64_t bytes;
  void const* stream;
  std::thread::id thread;
};

// Actions of other threads, and their results.
struct State {
  std::mutex mutex;
  std::vector<Call> calls;
  bool has_memory = true;
  bool has_capture = false;  // another thread captures a stream in the default (global) mode
  bool is_invalidated = false;
  cutlass_attn::KernelFacts facts = {128, 1024, 64, 0, 64};  // of code that is loaded
  std::set<std::pair<int, void const*>> loaded;              // code, by device
};

inline State& state() {
  static State& all = *new State;
  return all;
}

inline thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
inline thread_local int device = 0;

inline void record(char const* name, void* address = nullptr, int64_t bytes = 0,
                   void const* stream = nullptr) {
  std::lock_guard<std::mutex> const locked(state().mutex);
  state().calls.push_back({name, address, bytes, stream, std::this_thread::get_id()});
}

inline std::vector<Call> take_calls() {
  std::lock_guard<std::mutex> const locked(state().mutex);
  return std::move(state().calls);
}

// A call that a capture in global mode forbids to every thread that has not relaxed its mode.
inline cudaError_t unsafe(char const* name, void* address = nullptr, int64_t bytes = 0) {
  record(name, address, bytes);
  if (!state().has_capture || mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  state().is_invalidated = true;
  return cudaErrorStreamCaptureUnsupported;
}

// CUDA loads code lazily: at its first launch on a device, unless its attributes were queried
// before.
inline cudaError_t load(char const* name, void const* code, void const* stream = nullptr) {
  bool is_first = false;
  {
    std::lock_guard<std::mutex> const locked(state().mutex);
    is_first = state().loaded.insert({device, code}).second;
  }
  if (is_first) return unsafe(name);
  record(name, nullptr, 0, stream);
  return cudaSuccess;
}

// Work on the legacy stream invalidates a capture in any mode.
inline cudaError_t legacy(char const* name) {
  record(name);
  if (!state().has_capture) return cudaSuccess;
  state().is_invalidated = true;
  return cudaErrorStreamCaptureImplicit;
}

}  // namespace fake

extern "C" {

cudaError_t __wrap_cudaGetDevice(int* device) {
  *device = fake::device;
  return cudaSuccess;
}
cudaError_t __wrap_cudaSetDevice(int device) {
  fake::device = device;
  return cudaSuccess;
}
cudaError_t __wrap_cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  std::map<int, int> const ada = {{cudaDevAttrComputeCapabilityMajor, 8},
                                  {cudaDevAttrComputeCapabilityMinor, 9},
                                  {cudaDevAttrMultiProcessorCount, 128},
                                  {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 100 << 10},
                                  {cudaDevAttrMaxSharedMemoryPerBlockOptin, 99 << 10}};
  *value = ada.at(attribute);
  return cudaSuccess;
}
cudaError_t __wrap_cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  fake::record("cudaThreadExchangeStreamCaptureMode");
  std::swap(*mode, fake::mode);
  return cudaSuccess;
}
cudaError_t __wrap_cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  fake::record("cudaStreamIsCapturing");
  bool const is_captured = stream && reinterpret_cast<fake::Stream*>(stream)->is_captured;
  *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t __wrap_cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  fake::record("cudaStreamGetId");
  *id = stream ? reinterpret_cast<fake::Stream*>(stream)->id : 1;
  return cudaSuccess;
}
cudaError_t __wrap_cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
  *stream = reinterpret_cast<cudaStream_t>(fake::new_stream());
  return fake::unsafe("cudaStreamCreateWithFlags");
}
cudaError_t __wrap_cudaStreamSynchronize(cudaStream_t) {
  return fake::unsafe("cudaStreamSynchronize");
}
cudaError_t __wrap_cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<fake::Stream*>(stream);
  return cudaSuccess;
}
cudaError_t __wrap_cudaMalloc(void** data, size_t bytes) {
  static std::atomic<uintptr_t> next{uintptr_t(1) << 45};  // never read
  if (!fake::state().has_memory) {
    fake::record("cudaMalloc");
    return cudaErrorMemoryAllocation;
  }
  *data = reinterpret_cast<void*>(next.fetch_add((bytes + 511) / 512 * 512));
  return fake::unsafe("cudaMalloc", *data, int64_t(bytes));
}
cudaError_t __wrap_cudaFree(void* data) { return fake::unsafe("cudaFree", data); }
cudaError_t __wrap_cudaMemcpy(void* to, void const* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return fake::legacy("cudaMemcpy");
}
cudaError_t __wrap_cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  if (stream == nullptr) return fake::legacy("cudaMemcpyAsync");
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t __wrap_cudaMemsetAsync(void* data, int, size_t bytes, cudaStream_t stream) {
  fake::record("cudaMemsetAsync", data, int64_t(bytes), stream);
  return cudaSuccess;
}
cudaError_t __wrap_cudaFuncGetAttributes(cudaFuncAttributes*, void const* code) {
  return fake::load("cudaFuncGetAttributes", code);
}
cudaError_t __wrap_cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) {
  return fake::unsafe("cudaFuncSetAttribute");
}
cudaError_t __wrap_cudaLaunchKernel(void const* code, dim3, dim3, void**, size_t,
                                    cudaStream_t stream) {
  return fake::load("cudaLaunchKernel", code, stream);
}
cudaError_t __wrap_cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* code, void**) {
  return fake::load("cudaLaunchKernel", code, config->stream);
}
cudaError_t __wrap_cudaLibraryLoadData(cudaLibrary_t* library, void const*, cudaJitOption*, void**,
                                       unsigned, cudaLibraryOption*, void**, unsigned) {
  *library = nullptr;
  return fake::unsafe("cudaLibraryLoadData");
}
cudaError_t __wrap_cudaLibraryUnload(cudaLibrary_t) { return fake::unsafe("cudaLibraryUnload"); }
cudaError_t __wrap_cudaLibraryGetGlobal(void** data, size_t* bytes, cudaLibrary_t, char const*) {
  *data = &fake::state().facts;
  *bytes = sizeof(fake::state().facts);
  return fake::unsafe("cudaLibraryGetGlobal");
}
cudaError_t __wrap_cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, char const*) {
  static std::atomic<uintptr_t> next{uintptr_t(1) << 46};  // never read
  *kernel = reinterpret_cast<cudaKernel_t>(next++);
  return fake::unsafe("cudaLibraryGetKernel");
}

}  // extern "C"
