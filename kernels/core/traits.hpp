// What a tensor-core kernel is compiled for, as its template arguments:
//
//   Kernel<cutlass::half_t, TileShape<64, 64, 128, 64, 4>, with::Bias, with::Mask>
//
// an element type, the tile of a block, and options in any order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/e4m3.hpp"
#include "core/sequences.hpp"

namespace cutlass_attn {

// kWarpsM warps share out the rows of a block's tile, and kWarpsN warps the columns of their rows.
template <int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarpsM_, int kWarpsN_ = 1>
struct TileShape {
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarps = kWarpsM * kWarpsN;
};

namespace with {
struct Option {
  static constexpr bool kIsOption = true;
};
struct PackedRows : Option {};    // or batch entries of different lengths
struct Pages : Option {};         // K and V are in pages
struct Bias : Option {};          // of q's dtype; the kernel's header says how it lies in memory
struct AnyBias : Option {};       // or of float32, with any strides
struct BiasGrad : Option {};      // the gradient of a bias
struct Mask : Option {};          // a bool mask, read by its map (core/mask_map.hpp)
struct Dropout : Option {};       // with a score that has none of its own
struct GeneralScore : Option {};  // a backward kernel that has no other score
struct FixedOrder : Option {};    // the additions to dQ have an order
struct KeySplits : Option {};     // several blocks share the keys of a tile of rows
struct OwnValues : Option {};     // for latent attention's kernel: V is not a view of K
// K and V are stored in another type than Q: E4M3, or a token format (core/token_format.hpp).
template <class Type_>
struct StoredAs : Option {
  using Type = Type_;
};
// Accumulator types of Q K^T and P V, where they are not float.
template <class Qk_, class Pv_>
struct Accumulators : Option {
  using Qk = Qk_;
  using Pv = Pv_;
};
}  // namespace with

// The accumulators among some options; Default if there are none.
template <class Default, class... Given>
struct AccumulatorsOf {
  using type = Default;
};
template <class Default, class First, class... Others>
struct AccumulatorsOf<Default, First, Others...> : AccumulatorsOf<Default, Others...> {};
template <class Default, class Qk, class Pv, class... Others>
struct AccumulatorsOf<Default, with::Accumulators<Qk, Pv>, Others...> {
  using type = with::Accumulators<Qk, Pv>;
};

// The type of K and V in memory among some options; Default if there is none.
template <class Default, class... Given>
struct StoredTypeOf {
  using type = Default;
};
template <class Default, class First, class... Others>
struct StoredTypeOf<Default, First, Others...> : StoredTypeOf<Default, Others...> {};
template <class Default, class Type, class... Others>
struct StoredTypeOf<Default, with::StoredAs<Type>, Others...> {
  using type = Type;
};

template <class Element_, class Shape, class... Given>
struct Traits : Shape {
  static_assert((Given::kIsOption && ...));
  template <class Option>
  static constexpr bool has = (std::is_same_v<Option, Given> || ...);
  template <class Option, class... Options>
  static constexpr bool is_among = (std::is_same_v<Option, Options> || ...);
  // Whether a kernel that implements these options implements all that are given.
  template <class... Options>
  static constexpr bool are_among = (is_among<Given, Options...> && ...);

  using Element = Element_;
  using Kv = typename StoredTypeOf<Element, Given...>::type;
  static constexpr bool kIsFp8 = std::is_same_v<Kv, E4M3>;
  using Accumulators = typename AccumulatorsOf<with::Accumulators<float, float>, Given...>::type;
  // Elements of K's tiles in shared memory: K is rounded to int8 if its products are integers.
  using ElementK =
      std::conditional_t<std::is_same_v<typename Accumulators::Qk, int32_t>, int8_t, Kv>;

  static constexpr bool kIsPaged = has<with::Pages>;
  static constexpr bool kIsDense = !kIsPaged && !has<with::PackedRows>;
  using SeqInfo = std::conditional_t<kIsDense, DenseSeqInfo, VarlenSeqInfo>;

  static constexpr bool kHasAnyBias = has<with::AnyBias>;
  static constexpr bool kHasBias = has<with::Bias> || kHasAnyBias;
  static constexpr bool kHasBiasGrad = has<with::BiasGrad>;
  static constexpr bool kHasMask = has<with::Mask>;
  static constexpr bool kDrops = has<with::Dropout>;
  static constexpr bool kIsGeneral = has<with::GeneralScore>;
  static constexpr bool kIsOrdered = has<with::FixedOrder>;
  static constexpr bool kSplitsKeys = has<with::KeySplits>;
};

}  // namespace cutlass_attn
