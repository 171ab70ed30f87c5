// Conversion of elements to floats and back by their constructors; cpu/element.hpp has the
// conversions for the CPU.
#pragma once

#include "core/e4m3.hpp"
#include "core/macros.hpp"

namespace cutlass_attn::serving {

struct ByConstructor {
  template <class Element>
  CA_HOST_DEVICE static float load(Element x) {
    return float(x);
  }
  template <class Element>
  CA_HOST_DEVICE static void store(float x, Element& to) {
    to = Element(x);
  }
  CA_HOST_DEVICE static void store(float x, E4M3& to) { to = to_e4m3(x); }
};

}  // namespace cutlass_attn::serving
