// Result of a host-side call. Host only.
#pragma once

#include <string>
#include <utility>

namespace cutlass_attn {

enum class StatusCode {
  kOk,
  kInvalidArgument,  // the request contradicts itself or the contract
  kNoKernel,         // a valid request that no compiled kernel supports on this device
  kDeviceError,      // the CUDA runtime, or simt in its place, reported an error
};

struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::string message;  // names the argument, what was given and what is allowed

  bool ok() const { return code == StatusCode::kOk; }

  static Status invalid(std::string message) {
    return {StatusCode::kInvalidArgument, std::move(message)};
  }
  static Status no_kernel(std::string message) {
    return {StatusCode::kNoKernel, std::move(message)};
  }
  static Status device_error(std::string message) {
    return {StatusCode::kDeviceError, std::move(message)};
  }
};

}  // namespace cutlass_attn
