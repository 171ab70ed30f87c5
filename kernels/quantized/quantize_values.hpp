// Rounds K to int8 and V to int8 or e4m3 in one launch, before the kernel that multiplies both in 8
// bits.
//
// Grid:      that of QuantizeKeys, then an equal number of blocks for V.
// Block:     four warps; several neighbouring tiles of 64 values.
// Warp:      16 keys of a tile.
// Thread:    two neighbouring keys. Each lane of a quad has every fourth group of 8 columns: two
//            loads of 16 bytes, and later one store for both keys.
// Shared:    largest value of each warp, for two tiles.
#pragma once

#include "quantized/quantize.hpp"

namespace cutlass_attn {

template <class Element, int kHeadDim, int kHeadDimV, class Params_ = QuantizedValuesParams>
struct QuantizeKeysAndValues {
  using Params = Params_;
  using Head = typename Params::Head;
  using Tiles = QuantizedTiles<Head>;
  static constexpr bool kIsFp8 = Params::TileScales::kIsFp8;
  using Keys = QuantizeKeys<Element, kHeadDim, Params>;
  static constexpr int kThreads = Keys::kThreads, kSmemBytes = Keys::kSmemBytes;
  // kVectors: per key, 8 columns each.
  static constexpr int kWarps = kThreads / 32, kVectors = kHeadDimV / 32;
  static_assert(16 * kWarps == quantize::kTileKeys && kHeadDimV % 32 == 0);

  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    run<Arch>(params, smem, Arch::block());
  }
  // Runs block `of_both` of the grid.
  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem, int of_both) {
    int const block = of_both - params.key_tiles.heads * params.key_tiles.head_blocks;
    if (block < 0) {
      Keys::template run<Arch>(params, smem, of_both);
      return;
    }
    Tiles const own = params.template tiles_of_block<Arch>(block);
    if (Params::KeyTiles::kMayBeNone && own.first >= own.end) return;
    Values const values(params, params.source_v, params.problem.head_dim_v, own.head);
    if (values.is_aligned) {
      round<Arch, true>(params, own, values, reinterpret_cast<float*>(smem));
    } else {
      round<Arch, false>(params, own, values, reinterpret_cast<float*>(smem));
    }
  }

 private:
  using Values = SourceRows<Element>;

  // A magnitude, if it counts for the largest value of a key, else 0. In e4m3, Inf and NaN are
  // stored as such and do not count. In int8 they make the scale of their key NaN.
  CUTE_DEVICE static uint32_t counted(uint32_t magnitude) {
    constexpr uint32_t kInfinity = std::is_same_v<Element, cutlass::half_t> ? 0x7c00 : 0x7f80;
    return kIsFp8 && magnitude >= kInfinity ? 0 : magnitude;
  }

  template <class Arch, bool kIsAligned>
  CUTE_DEVICE static void round(Params const& params, Tiles const& own, Values const& values,
                                float* of_warps) {
    CUTE_NO_UNROLL
    for (int tile = own.first; tile < own.end; ++tile) {
      // One barrier per tile suffices: of_warps is double-buffered.
      round_tile<Arch, kIsAligned>(params, own.head, tile, values, of_warps + tile % 2 * kWarps);
    }
  }

  template <class Arch, bool kIsAligned>
  CUTE_DEVICE static void round_tile(Params const& params, Head const& head, int tile,
                                     Values const& values, float* of_warps) {
    int const head_dim_v = params.problem.head_dim_v;
    int const warp = Arch::thread() / 32, pair = Arch::thread() % 32 / 4;
    int const first_key = warp * 16 + pair * 2, first_column = Arch::thread() % 4 * 8;
    uint32_t words[2][kVectors][4];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        int const key = tile * quantize::kTileKeys + first_key + i;
        values.template load<kIsAligned>(key, first_column + v * 32, words[i][v]);
      }
    }
    uint32_t amax[2] = {0, 0};  // bits of an Element without the sign
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (auto const& vector : words[i]) {
        CUTE_UNROLL
        for (uint32_t pair_of : vector) {
          uint32_t const low = counted(pair_of & 0x7fffu);
          uint32_t const high = counted(pair_of >> 16 & 0x7fffu);
          uint32_t const larger = low > high ? low : high;
          amax[i] = larger > amax[i] ? larger : amax[i];
        }
      }
    }
    uint32_t bits[2];
    float largest = 0.0f;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int mask = 1; mask < 4; mask *= 2) {
        uint32_t const other = Arch::shuffle_xor(amax[i], mask);
        amax[i] = other > amax[i] ? other : amax[i];
      }
      float const of_key = element_to_float<Element>(uint16_t(amax[i]));
      bits[i] = float_bits(of_key);
      largest = fmaxf(largest, quantize::finite_or_zero(of_key));
    }
    CUTE_UNROLL
    for (int mask = 4; mask < 32; mask *= 2) {
      largest = fmaxf(largest, Arch::shuffle_xor(largest, mask));
    }
    if (Arch::thread() % 32 == 0) of_warps[warp] = largest;
    Arch::sync();  // largest of all warps full
    CUTE_UNROLL
    for (int i = 0; i < kWarps; ++i) largest = fmaxf(largest, of_warps[i]);

    auto& scales = *params.scales_of(head, tile);
    float inverse[2];
    if constexpr (kIsFp8) {
      quantize::Factors const factors = quantize::fp8_factors_of(largest);
      inverse[0] = inverse[1] = factors.inverse;
      if (Arch::thread() < quantize::kGroups) scales.set_v(Arch::thread(), factors.scale);
    } else {
      quantize::ValueFactors const factors[2] = {quantize::value_factors_of(bits[0], largest),
                                                 quantize::value_factors_of(bits[1], largest)};
      if (Arch::thread() % 4 == 0) {
        auto& of_lane = scales.lanes[pair % 4];
        of_lane.folded[warp * 2 + pair / 4] =
            Arch::template pack<cutlass::half_t>(factors[0].folded, factors[1].folded);
      }
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        inverse[i] = factors[i].inverse;
        if (bits[i] < 0x7f800000u) continue;
        // The key's scale is not finite. Its values become 0, and 0 times that scale is NaN.
        CUTE_UNROLL
        for (auto& vector : words[i]) {
          CUTE_UNROLL
          for (uint32_t& word : vector) word = 0;
        }
      }
      float const v_scale = quantize::factors_of(float_bits(largest)).scale;
      if (Arch::thread() < quantize::kGroups) scales.lanes[Arch::thread()].v = v_scale;
    }

    Operand const& v8 = params.problem.v;  // elements of two bytes
    int64_t const number = params.key_tiles.number(head, tile);
    int64_t const row = number * (quantize::kTileKeys / 2) + warp * 8 + pair_row(pair);
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      int const column = first_column + v * 32;
      if (!Params::kTransposesV && column >= head_dim_v) continue;
      uint32_t packed[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {  // two columns, of two keys each
        float x[4];
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          x[e] = element_of<Element>(words[e % 2][v], 2 * i + e / 2);
        }
        packed[i] = round<Arch>(x, inverse);
      }
      if constexpr (Params::kTransposesV) {
        store_transposed<Arch>(packed, static_cast<char*>(v8.data), number, v * 32, head_dim_v);
        continue;
      }
      store_vector(static_cast<char*>(v8.data) + (row * head_dim_v + column) * 2, packed);
    }
  }

  // Stores 32 columns of a tile with its keys next to each other: sm90/quantized/params.hpp. Two
  // keys of eight columns become 16 keys of one column, by shuffles. `words`: of two columns each.
  template <class Arch>
  CUTE_DEVICE static void store_transposed(uint32_t const (&words)[4], char* v8, int64_t number,
                                           int first_column, int head_dim_v) {
    int const warp = Arch::thread() / 32, lane = Arch::thread() % 32, half = lane / 16;
    uint32_t of_column[4];  // four keys each: pairs t and t + 4
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const own = half == 0 ? words[i] : words[2 + i];
      uint32_t const got = Arch::shuffle_xor(half == 0 ? words[2 + i] : words[i], 16);
      uint32_t const low = half == 0 ? own : got, high = half == 0 ? got : own;
      of_column[2 * i] = Arch::prmt(low, high, 0x5410);
      of_column[2 * i + 1] = Arch::prmt(low, high, 0x7632);
    }
    int const t = lane / 4 % 4;
    transpose_four<Arch, 4>(of_column, t);
    int const column = first_column + lane % 4 * 8 + half * 4 + t;
    if (column >= head_dim_v) return;
    int64_t const row = number / 2 * head_dim_v + column;  // of 128 keys
    store_vector(v8 + row * 128 + number % 2 * 64 + warp * 16, of_column);
  }

  // Rounds two columns of two keys.
  template <class Arch>
  CUTE_DEVICE static uint32_t round(float const (&x)[4], float const (&inverse)[2]) {
    if constexpr (kIsFp8) {
      float scaled[4];
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) scaled[e] = quantize::to_fp8_value(x[e], inverse[e % 2]);
      return Arch::pack_e4m3(scaled[0], scaled[1], scaled[2], scaled[3]);
    } else {
      uint32_t bytes[4];
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) {
        bytes[e] = quantize::to_int8(x[e], inverse[e % 2]);
      }
      return Arch::pack_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
    }
  }
};

}  // namespace cutlass_attn
