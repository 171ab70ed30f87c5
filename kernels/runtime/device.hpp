// The CUDA runtime, as much of it as dispatch needs.
#pragma once

#include "cutlass_attn.hpp"

#if __has_include(<driver_types.h>)
#include <driver_types.h>
namespace cutlass_attn {
// Success, or a kDeviceError that names the call and quotes the runtime.
Status cuda_status(cudaError_t error, char const* what);
}  // namespace cutlass_attn
#endif

namespace cutlass_attn {

struct Launch;

// A workspace that is kept for kernels of this stream, which run one after the other: as long as
// the process, for an allocation takes as long as half of a launch. Of kKeptBytes, or of none where
// the GPU has no room for so many; its zeros are kZerosBytes. Empty where it cannot be had: the
// stream is being captured, say, and what is captured may run on another one.
inline constexpr int64_t kKeptBytes = 16 << 20, kZerosBytes = 64 << 10;
Workspace kept_workspace(int device_index, void* stream);

// A __global__ function with one argument, on the options' stream.
Status launch_on_device(void const* function, void* params, Launch const& launch,
                        RunOptions const& options);

// Makes a device current for a scope and restores the caller's at its end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_index);
  ~DeviceGuard();
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;
  Status const& status() const { return status_; }

 private:
  int previous_ = -1;  // -1: nothing to restore
  Status status_;
};

}  // namespace cutlass_attn
