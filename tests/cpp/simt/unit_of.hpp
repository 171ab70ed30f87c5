// A kernel type that is not in the manifest as a unit, with the launches before and after it if it
// has some.
#pragma once

#include <type_traits>

#include "simt/host_unit.hpp"

namespace cutlass_attn::simt {

template <class Params, class = void>
inline constexpr bool has_pre_post = false;
template <class Params>
inline constexpr bool has_pre_post<Params, std::void_t<decltype(&Params::launch_after)>> = true;

template <class Kernel, class... Scores>
KernelUnit unit_of() {
  if constexpr (has_pre_post<typename Kernel::Params>) {
    return host_unit_with_pre_post<Kernel, Scores...>();
  } else {
    return host_unit<Kernel, Scores...>();
  }
}
template <class Kernel, class... Scores>
constexpr KernelArguments arguments_of_kernel() {
  if constexpr (has_pre_post<typename Kernel::Params>) {
    return arguments_with_pre_post_of<typename Kernel::Params, Scores...>();
  } else {
    return arguments_of<typename Kernel::Params, Scores...>();
  }
}

}  // namespace cutlass_attn::simt
