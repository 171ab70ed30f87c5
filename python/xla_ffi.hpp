// The structs that handlers of XLA's foreign function interface read and write, in version 0.3, as
// in jaxlib's xla/ffi/api/c_api.h: C structs whose layout XLA keeps within a version. Stated here
// so that a build needs no jaxlib; tests/call/test_jax.py compares the two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cutlass_attn::xla {

inline constexpr int kMajor = 0, kMinor = 3;

struct Error;
struct Context;

enum class ErrorCode : int { kInvalidArgument = 3, kUnimplemented = 12, kInternal = 13 };

enum class DataType : int { kPred = 1, kS32 = 4, kF16 = 10, kF32 = 11, kF64 = 12, kBF16 = 16 };

// Every struct begins with its size and a list of extensions.
struct Extension {
  size_t size;
  int type;  // 1: Metadata
  Extension* next;
};
inline constexpr int kMetadata = 1;

struct Version {
  size_t size;
  Extension* extensions;
  int major, minor;  // written
};

struct Metadata {
  size_t size;
  Version version;
  uint32_t traits;
};

// A call with this extension asks for metadata, and runs nothing.
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  size_t size;
  Extension* extensions;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t const* dims;
};

struct Text {
  char const* data;
  size_t length;
};

struct Scalar {
  DataType dtype;
  void const* value;
};

// Arguments and results: `items` are Buffers. Attributes: Scalars, if their type is kScalar.
struct Buffers {
  size_t size;
  Extension* extensions;
  int64_t count;
  int const* types;
  Buffer* const* items;
};

struct Attributes {
  size_t size;
  Extension* extensions;
  int64_t count;
  int const* types;
  Text* const* names;
  Scalar* const* items;
};
inline constexpr int kScalar = 3;

struct CreateError {
  size_t size;
  Extension* extensions;
  char const* message;
  ErrorCode code;
};

struct DestroyError {
  size_t size;
  Extension* extensions;
  Error* error;
};

struct GetStream {
  size_t size;
  Extension* extensions;
  Context* context;
  void* stream;  // written
};

struct AllocateMemory {
  size_t size;
  Extension* extensions;
  Context* context;
  size_t bytes, alignment;
  void* data;  // written
};

struct FreeMemory {
  size_t size;
  Extension* extensions;
  Context* context;
  size_t bytes;
  void* data;
};

struct GetDevice {
  size_t size;
  Extension* extensions;
  Context* context;
  int32_t ordinal;  // written
};

struct Api {
  size_t size;
  Extension* extensions;
  Version version;
  void const* internal;
  Error* (*create_error)(CreateError*);
  void (*get_message)(void*);
  void (*destroy_error)(DestroyError*);
  void (*others_before_stream[1])();
  Error* (*get_stream)(GetStream*);
  void (*others_before_memory[4])();
  Error* (*allocate_memory)(AllocateMemory*);
  Error* (*free_memory)(FreeMemory*);
  void (*others_before_device[6])();
  Error* (*get_device)(GetDevice*);
};

struct CallFrame {
  size_t size;
  Extension* extensions;
  Api const* api;
  Context* context;
  int stage;
  Buffers arguments, results;
  Attributes attributes;
};

}  // namespace cutlass_attn::xla
