// Kernels that the tests of the backward pass instantiate.
#pragma once

#include "backward_cases.hpp"
#include "sm80/backward.hpp"
#include "sm90/backward.hpp"
#include "sm90/backward_two_pass.hpp"

namespace backward_case {

using Half = cutlass::half_t;
using BFloat = cutlass::bfloat16_t;

// A backward kernel's tile: queries of a step, keys of a block.
template <int kHeadDim, int kBlockM, int kBlockN, int kWarps>
using Tile = TileShape<kHeadDim, kHeadDim, kBlockM, kBlockN, kWarps>;
// Those of sm90::Backward.
using Wgmma64 = Tile<64, 64, 192, 12>;
using Wgmma64Q128 = Tile<64, 128, 128, 8>;  // steps of 128 queries
using Wgmma128 = Tile<128, 64, 128, 8>;

template <class Element, class Shape>
using BiasGrad =
    sm80::Backward<Element, Shape, with::PackedRows, with::BiasGrad, with::GeneralScore>;

template <class Element, class Shape, class... Options>
using Masked = sm90::Backward<Element, Shape, with::Mask, Options...>;
template <class Element, class Shape, class... Options>
using WgmmaDropout = sm90::Backward<Element, Shape, with::Dropout, Options...>;
template <class Element, class Shape, class... Options>
using WgmmaBiasGrad = sm90::Backward<Element, Shape, with::Bias, with::BiasGrad, Options...>;
template <class Element, class Shape, class... Options>
using WgmmaBias = sm90::Backward<Element, Shape, with::Bias, Options...>;

template <class Element, int kHeadDim, int kHeadDimV, class... Options>
using TwoPass =
    sm90::BackwardTwoPass<Element, TileShape<kHeadDim, kHeadDimV, 64, 64, 8>, Options...>;

}  // namespace backward_case
