// CuTe atoms that run on the CPU engine. Each inherits from the device atom it stands for, and so
// do its traits: the layouts a kernel is checked with are the ones the GPU is programmed with.
#pragma once

#include <cute/tensor.hpp>
// copy_atom.hpp cannot be the first header of CuTe.
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <type_traits>

#include "simt/engine.hpp"

namespace cutlass_attn::simt {

namespace detail {
template <class Element, class Accumulator>
struct HostMmaBase {
  using type = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct HostMmaBase<cutlass::bfloat16_t, float> {
  using type = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};
template <>
struct HostMmaBase<cutlass::half_t, cutlass::half_t> {
  using type = cute::SM80_16x8x16_F16F16F16F16_TN;
};
template <bool kTransposed>
using HostLoadMatrixBase =
    std::conditional_t<kTransposed, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
using HostAsyncCopyBase = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
}  // namespace detail

template <class Element, class Accumulator>
struct HostMma : detail::HostMmaBase<Element, Accumulator>::type {
  static_assert(std::is_same_v<Accumulator, float>);
  static_assert(std::is_same_v<Element, cutlass::half_t> ||
                std::is_same_v<Element, cutlass::bfloat16_t>);

  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t const& a0,
                  uint32_t const& a1, uint32_t const& a2, uint32_t const& a3, uint32_t const& b0,
                  uint32_t const& b1, float const& c0, float const& c1, float const& c2,
                  float const& c3) {
    constexpr engine::MmaInput kInput = std::is_same_v<Element, cutlass::half_t>
                                            ? engine::MmaInput::kFloat16
                                            : engine::MmaInput::kBFloat16;
    float c[4] = {c0, c1, c2, c3};
    engine::mma_m16n8k16(kInput, c, {a0, a1, a2, a3}, {b0, b1});
    d0 = c[0];
    d1 = c[1];
    d2 = c[2];
    d3 = c[3];
  }
};

// With fp16 accumulators: the accumulator and the 16 products are added up in fp32, and the sum is
// rounded to fp16, to nearest even, once. Hardware may round after the first eight products too:
// judge results by a rule that allows for both (python/cutlass_attn/testing.py).
template <>
struct HostMma<cutlass::half_t, cutlass::half_t>
    : detail::HostMmaBase<cutlass::half_t, cutlass::half_t>::type {
  static void fma(uint32_t& d0, uint32_t& d1, uint32_t const& a0, uint32_t const& a1,
                  uint32_t const& a2, uint32_t const& a3, uint32_t const& b0, uint32_t const& b1,
                  uint32_t const& c0, uint32_t const& c1) {
    auto const half = [](uint32_t bits) { return float(cutlass::half_t::bitcast(uint16_t(bits))); };
    auto const pack = [](float low, float high) {
      return uint32_t(cutlass::half_t(low).raw()) | uint32_t(cutlass::half_t(high).raw()) << 16;
    };
    float c[4] = {half(c0), half(c0 >> 16), half(c1), half(c1 >> 16)};
    engine::mma_m16n8k16(engine::MmaInput::kFloat16, c, {a0, a1, a2, a3}, {b0, b1});
    d0 = pack(c[0], c[1]);
    d1 = pack(c[2], c[3]);
  }
};

template <bool kTransposed>
struct HostLoadMatrix : detail::HostLoadMatrixBase<kTransposed> {
  static void copy(cute::uint128_t const& smem, uint32_t& d0, uint32_t& d1, uint32_t& d2,
                   uint32_t& d3) {
    uint32_t d[4];
    engine::load_matrix(kTransposed, &smem, d);
    d0 = d[0];
    d1 = d[1];
    d2 = d[2];
    d3 = d[3];
  }
};

struct HostAsyncCopy : detail::HostAsyncCopyBase {
  static void copy(cute::uint128_t const& global, cute::uint128_t& smem, bool predicate) {
    engine::async_copy(&smem, &global, predicate);
  }
};

}  // namespace cutlass_attn::simt

namespace cute {

template <class Element, class Accumulator>
struct MMA_Traits<cutlass_attn::simt::HostMma<Element, Accumulator>>
    : MMA_Traits<typename cutlass_attn::simt::detail::HostMmaBase<Element, Accumulator>::type> {};

template <bool kTransposed>
struct Copy_Traits<cutlass_attn::simt::HostLoadMatrix<kTransposed>>
    : Copy_Traits<cutlass_attn::simt::detail::HostLoadMatrixBase<kTransposed>> {};

template <>
struct Copy_Traits<cutlass_attn::simt::HostAsyncCopy>
    : Copy_Traits<cutlass_attn::simt::detail::HostAsyncCopyBase> {
  constexpr Copy_Traits with(bool predicate) const {
    Copy_Traits traits;
    traits.pred = predicate;
    return traits;
  }

  // The device traits unpack themselves too, to pass the predicate.
  template <class TS, class SLayout, class TD, class DLayout>
  friend constexpr void copy_unpack(Copy_Traits const& traits, Tensor<TS, SLayout> const& src,
                                    Tensor<TD, DLayout>& dst) {
    static_assert(is_gmem<TS>::value && is_smem<TD>::value, "cp.async: global to shared memory");
    Tensor rS = recast<uint128_t>(src);
    Tensor rD = recast<uint128_t>(dst);
    CUTE_STATIC_ASSERT_V(size(rS) == Int<1>{} && size(rD) == Int<1>{});
    cutlass_attn::simt::HostAsyncCopy::copy(rS[0], rD[0], traits.pred);
  }
};

}  // namespace cute
