// CUTLASS_ATTN_CUDA, 0 or 1, comes from CMake.
#include "runtime/device.hpp"

#if CUTLASS_ATTN_CUDA
#include <cuda_runtime_api.h>

#include <atomic>
#endif

namespace cutlass_attn {

#if CUTLASS_ATTN_CUDA

Status cuda_status(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // or the next launch would report this error as its own
  return Status::device_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" +
                              cudaGetErrorString(error) + ")");
}

namespace {

// Major * 10 + minor of a device; 0 if the runtime will not say.
int compute_capability(int device) {
  // Asking costs microseconds, so the first answer is kept. Failures are not: a driver may be
  // there next time.
  static std::atomic<int> known[64];
  bool const is_kept = device >= 0 && device < 64;
  if (is_kept) {
    if (int const value = known[device].load(std::memory_order_relaxed)) return value;
  }
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  if (is_kept) known[device].store(major * 10 + minor, std::memory_order_relaxed);
  return major * 10 + minor;
}

std::string why_unavailable(int device) {
  int driver = 0, runtime = 0, count = 0;
  cudaDriverGetVersion(&driver);
  if (driver == 0) return "no NVIDIA driver";
  cudaRuntimeGetVersion(&runtime);
  auto const version = [](int v) {
    return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
  };
  if (driver / 1000 < runtime / 1000) {
    return "the NVIDIA driver supports CUDA " + version(driver) + ", this build needs " +
           version(runtime);
  }
  if (Status status = cuda_status(cudaGetDeviceCount(&count), "cudaGetDeviceCount"); !status.ok()) {
    return status.message;
  }
  return "CUDA device " + std::to_string(device) + " does not exist: there are " +
         std::to_string(count);
}

}  // namespace

DeviceGuard::DeviceGuard(int device_index) {
  int current = -1;
  status_ = cuda_status(cudaGetDevice(&current), "cudaGetDevice");
  if (!status_.ok() || current == device_index) return;
  status_ = cuda_status(cudaSetDevice(device_index), "cudaSetDevice");
  if (status_.ok()) previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  // Going back to a device that was current before has no failure that a caller could act on.
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

#else

namespace {

constexpr char const* kNoCuda = "this build has no CUDA kernels: rebuild with CUTLASS_ATTN_CUDA=ON";

int compute_capability(int) { return 0; }
std::string why_unavailable(int) { return kNoCuda; }

}  // namespace

DeviceGuard::DeviceGuard(int) : status_(Status::device_error(kNoCuda)) {}
DeviceGuard::~DeviceGuard() = default;

#endif

DeviceInfo device_info(Device device, int device_index) {
  DeviceInfo info;
  info.device = device;
  if (device == Device::kCuda) {
    info.compute_capability = compute_capability(device_index);
    if (info.compute_capability == 0) info.unavailable = why_unavailable(device_index);
  }
  return info;
}

}  // namespace cutlass_attn
