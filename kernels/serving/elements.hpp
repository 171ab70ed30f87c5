// Maps the dtype of a cache or a result to a C++ type.
#pragma once

#include "core/problem.hpp"

namespace cutlass_attn::serving {

// Calls visit() with a value of Half, BFloat or float, and returns its result.
template <class Half, class BFloat, class Visit>
auto by_element(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kFloat16:
      return visit(Half());
    case DType::kBFloat16:
      return visit(BFloat());
    default:
      return visit(float());
  }
}

}  // namespace cutlass_attn::serving
