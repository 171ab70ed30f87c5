// The part of the CUDA runtime that dispatch needs.
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

// Launches a __global__ function with one argument on the stream of `options`.
Status launch_on_device(void const* function, void* params, Launch const& launch,
                        RunOptions const& options);

// Makes a device current for a scope, and restores the caller's device at its end.
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

#if __has_include(<driver_types.h>)
// Lets this thread allocate, load code and wait while another thread captures a stream. In the
// default capture mode such a call fails and invalidates the other thread's capture. The stream of
// the call itself must not be captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(RelaxedCapture const&) = delete;
  RelaxedCapture& operator=(RelaxedCapture const&) = delete;
  Status const& status() const { return status_; }

 private:
  int previous_ = 0;  // cudaStreamCaptureMode
  Status status_;
};
#endif

}  // namespace cutlass_attn
