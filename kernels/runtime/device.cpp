// CMake defines CUTLASS_ATTN_CUDA as 0 or 1.
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

// Sets all fields except `device`. If the runtime reports nothing, the compute capability is 0.
void read_attributes(int device, DeviceInfo& info) {
  // The query takes microseconds, so the first answer is kept, in one word. Failures are not kept:
  // a driver may be available next time.
  static std::atomic<uint64_t> known[64];
  bool const is_kept = device >= 0 && device < 64;
  uint64_t word = is_kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (word == 0) {
    int major = 0, minor = 0, sms = 0, smem = 0, smem_block = 0;
    struct {
      int* value;
      cudaDeviceAttr attribute;
    } const asked[] = {{&major, cudaDevAttrComputeCapabilityMajor},
                       {&minor, cudaDevAttrComputeCapabilityMinor},
                       {&sms, cudaDevAttrMultiProcessorCount},
                       {&smem, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
                       {&smem_block, cudaDevAttrMaxSharedMemoryPerBlockOptin}};
    for (auto const& [value, attribute] : asked) {
      if (cudaDeviceGetAttribute(value, attribute, device) == cudaSuccess) continue;
      (void)cudaGetLastError();
      return;
    }
    // Shared memory is a multiple of 64 bytes.
    word = uint64_t(smem / 64) << 48 | uint64_t(smem_block / 64) << 32 | uint64_t(sms) << 16 |
           uint64_t(major * 10 + minor);
    if (is_kept) known[device].store(word, std::memory_order_relaxed);
  }
  info.compute_capability = int(word & 0xffff);
  info.num_sms = int(word >> 16 & 0xffff);
  info.smem_per_block = int(word >> 32 & 0xffff) * 64;
  info.smem_per_sm = int(word >> 48) * 64;
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
  // If restoring the caller's device fails, no caller could act on it.
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

RelaxedCapture::RelaxedCapture() {
  auto mode = cudaStreamCaptureModeRelaxed;
  status_ = cuda_status(cudaThreadExchangeStreamCaptureMode(&mode),
                        "cudaThreadExchangeStreamCaptureMode");
  previous_ = mode;
}

RelaxedCapture::~RelaxedCapture() {
  auto mode = static_cast<cudaStreamCaptureMode>(previous_);
  if (status_.ok()) (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

#else

namespace {

constexpr char const* kNoCuda = "this build has no CUDA kernels: rebuild with CUTLASS_ATTN_CUDA=ON";

void read_attributes(int, DeviceInfo&) {}
std::string why_unavailable(int) { return kNoCuda; }

}  // namespace

DeviceGuard::DeviceGuard(int) : status_(Status::device_error(kNoCuda)) {}
DeviceGuard::~DeviceGuard() = default;

#endif

DeviceInfo device_info(Device device, int device_index) {
  DeviceInfo info;
  info.device = device;
  if (device == Device::kCuda) {
    read_attributes(device_index, info);
    if (info.compute_capability == 0) info.unavailable = why_unavailable(device_index);
  }
  return info;
}

DeviceInfo typical_device(int compute_capability) {
  struct {
    int compute_capability, num_sms, smem_kb;
  } const known[] = {
      {80, 108, 164},   // A100
      {86, 84, 100},    // A40; RTX 3090 has 82
      {87, 16, 164},    // Orin
      {89, 128, 100},   // RTX 4090; L40S has 142, L4 58
      {90, 132, 228},   // H100 SXM, H200
      {100, 148, 228},  // B200
      {103, 160, 228},  // B300
      {120, 170, 100},  // RTX 5090
  };
  DeviceInfo info;
  info.device = Device::kCuda;
  info.compute_capability = compute_capability;
  for (auto const& [capability, num_sms, smem_kb] : known) {
    // A device that is not listed counts as the last one listed before it.
    if (capability > compute_capability && info.num_sms != 0) break;
    info.num_sms = num_sms;
    info.smem_per_sm = smem_kb * 1024;
    info.smem_per_block = (smem_kb - 1) * 1024;  // a block takes 1 KB in addition to its own
  }
  return info;
}

}  // namespace cutlass_attn
