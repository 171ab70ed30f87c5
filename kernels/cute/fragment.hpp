// Views and conversions of register fragments of m16n8k16.
#pragma once

#include <cute/tensor.hpp>

#include "simt/numeric_conversion.hpp"

namespace cutlass_attn {

// An accumulator ((2, 2), M, N) of m16n8 atoms, seen as a matrix of the thread's rows and columns:
//
//   ((column pair, row half), M, N)  ->  ((row half, M), (column pair, N))
template <class Fragment>
CUTE_DEVICE auto as_rows(Fragment&& acc) {
  using namespace cute;
  auto const l = acc.layout();
  return make_tensor(acc.data(), make_layout(make_layout(get<0, 1>(l), get<1>(l)),
                                             make_layout(get<0, 0>(l), get<2>(l))));
}

// A fragment of the same layout in another element type, rounded to nearest even.
template <class Element, class Fragment>
CUTE_DEVICE auto convert_to(Fragment const& from) {
  using namespace cute;
  using From = typename Fragment::value_type;
  constexpr int kSize = decltype(size(from))::value;
  auto to = make_tensor_like<Element>(from);
  cutlass::NumericArrayConverter<Element, From, kSize> convert;
  auto const& in = *reinterpret_cast<cutlass::Array<From, kSize> const*>(from.data());
  *reinterpret_cast<cutlass::Array<Element, kSize>*>(raw_pointer_cast(to.data())) = convert(in);
  return to;
}

}  // namespace cutlass_attn
