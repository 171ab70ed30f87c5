// Forward attention on mma.sync with products in 8 bits: sm80/forward.hpp with these parts of its
// own. Q K^T is multiplied in int8; P V in 16 bits, int8 or e4m3.
//
// Before:   a launch rounds K, or K and V (quantized/quantize.hpp, quantize_values.hpp)
// Q:        a block rounds its rows, in operands.hpp
// Pipeline: with P V in 16 bits the schedules of 16 bits; else int8.hpp
#pragma once

#include "quantized/params.hpp"
#include "quantized/quantize_values.hpp"
#include "sm80/forward.hpp"
#include "sm80/quantized/int8.hpp"
#include "sm80/quantized/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Traits>
struct ForwardLaunch<Traits, int8_t> {
  using Config = sm80::Config<Traits>;
  using Element = typename Traits::Element;
  using KeyTiles = std::conditional_t<Config::kIsDense, DenseKeyTiles, VarlenKeyTiles>;
  using Params = BasicQuantizedParams<typename Config::Scales::OfTile, KeyTiles>;
  using Before = std::conditional_t<
      Config::kIs8BitV, QuantizeKeysAndValues<Element, Config::kHeadDim, Config::kHeadDimV, Params>,
      QuantizeKeys<Element, Config::kHeadDim, Params>>;
};

template <class Config, class Score, class Arch>
struct ScheduleOf<Config, Score, Arch, int8_t> {
  using Type = std::conditional_t<Config::kIs8BitV, Int8Schedule<Config, Score, Arch>,
                                  typename ScheduleOf<Config, Score, Arch, void>::Type>;
};

}  // namespace cutlass_attn::sm80
