// CMake defines CUTLASS_ATTN_CUDA as 0 or 1.
#include "core/tensor_map.hpp"

#include <cstring>

#if CUTLASS_ATTN_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>
#endif

namespace cutlass_attn {
namespace {

#if CUTLASS_ATTN_CUDA

// The driver's function, available from CUDA 12.0 on. Looked up at run time, so that the library
// loads without a driver.
auto encoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static Encode const found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    auto const error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                        cudaEnableDefault, &result);
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<Encode>(function)
               : nullptr;
  }();
  return found;
}

// Functions of the driver need a context in this thread. A new thread has one only after a call
// that makes the current device's context current.
bool has_context() {
  int device = 0;
  bool const made = cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
  if (!made) (void)cudaGetLastError();
  return made;
}

char const* encode_on_gpu(TensorView const& view, TensorMap& map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  auto const encode = encoder();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  cuuint64_t extents[TensorView::kDims], strides[TensorView::kDims - 1];
  cuuint32_t steps[TensorView::kDims];
  for (int i = 0; i < TensorView::kDims; ++i) {
    extents[i] = view.extent[i];
    steps[i] = 1;
  }
  for (int i = 0; i + 1 < TensorView::kDims; ++i) strides[i] = cuuint64_t(view.stride[i]);
  // Elements are copied unchanged, so any 16-bit type will do.
  auto const encoded = [&] {
    return encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                  TensorView::kDims, const_cast<void*>(view.data), extents, strides, view.box,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  if (encoded() || (has_context() && encoded())) return nullptr;
  return "the driver refuses a tensor map of q, k, v, the bias or the gradient of the output";
}

#else

char const* encode_on_gpu(TensorView const&, TensorMap&) {
  return "this build has no CUDA runtime";
}

#endif

}  // namespace

char const* encode(TensorView const& view, bool is_on_gpu, TensorMap& map) {
  if (is_on_gpu) return encode_on_gpu(view, map);
  std::memcpy(&map, &view, sizeof(view));
  return nullptr;
}

}  // namespace cutlass_attn
