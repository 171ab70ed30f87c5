// The part of DLPack's C interface (github.com/dmlc/dlpack, ABI version 1) that this library uses.
// An array library offers a table of functions as a capsule named kCapsuleName, in the attribute
// __dlpack_c_exchange_api__ of its tensor type. torch has it since 2.10.
#pragma once

#include <cstdint>

namespace cutlass_attn::dlpack {

inline constexpr char const* kCapsuleName = "dlpack_exchange_api";
inline constexpr uint32_t kMajorVersion = 1;  // the layout below

enum DeviceType : int32_t { kOtherDevice = 0, kCpu = 1, kCuda = 2 };
enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4M3 = 10,  // finite: float8_e4m3fn
  kOther = 255
};

struct Device {
  int32_t type, index;

  bool operator==(Device const& other) const { return type == other.type && index == other.index; }
};

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;

  bool operator==(DataType const& other) const {
    return code == other.code && bits == other.bits && lanes == other.lanes;
  }
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;    // (ndim), owned by the tensor
  int64_t* strides;  // (ndim), in elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  struct {
    uint32_t major, minor;
  } version;
  ExchangeApi* older;  // the table of an earlier version, or null

  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  // Both return 0, or -1 with a Python exception set. The target of `out` is valid as long as the
  // object is unchanged.
  int (*tensor_from_object)(void* object, Tensor* out);
  int (*current_work_stream)(int32_t device_type, int32_t device_index, void** stream);
};

}  // namespace cutlass_attn::dlpack
