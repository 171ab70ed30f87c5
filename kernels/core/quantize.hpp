// Products in 8 bits: the definition of the rounding, for all kernels.
//
// Quantize::kQk, S = softmax_scale * (q8 . k8) * scale_q * scale_k [+ softmax_scale * (q . shift)]:
//
//   shift    a vector of head_dim fp32 for each KV head of a batch entry: the mean of up to 64 of
//            its keys. It is subtracted from k, because keys have much in common. q . shift adds a
//            constant to all logits of a row, which softmax does not see. It is added where it
//            matters: before a softcap, next to a sink, and in the LSE.
//   k8       int8, of k - shift. Each tile of 64 keys, counted from key 0, has four groups with a
//            scale each: group t has the keys j with j % 8 / 2 == t. Those are the keys of a thread
//            in an m16n8 accumulator.
//   q8       int8, of q: a scale for each row.
//
// Quantize::kInt8 and kFp8 have this S, and round P and V, too:
//
//   kInt8    v8 is int8 with a scale for each key: of_tile / 127 * 8 / e, where of_tile is the
//            largest magnitude of a tile of 64 keys, and e the largest integer from 8 to 255 for
//            which nothing is clipped. The factor 8 / e is folded into P before P is rounded: for a
//            row and a tile, P' = round(255 w / largest w), with w = exp(score) * 8 / e, is uint8.
//            So a value that is much larger than others of its tile, or much smaller with a far
//            larger weight (an attention sink), costs the others no bits. On a GPU w, 8 / e and
//            255 / largest are rounded to fp16 before, which moves a few P' to the next integer.
//   kFp8     v8 is e4m3 with a scale for each tile of 64 keys: the power of 2 with which its
//            largest magnitude is in [64, 128). For a row and a tile, P' = kFp8Sum w / sum w, with
//            w = exp(score), is e4m3. kFp8Sum is the largest number of e4m3, so nothing is clipped,
//            and fp16 can hold the sum of the products of 64 keys, as it does here. A tile has its
//            own scale, so weights next to a dominant key of another tile keep their bits. A weight
//            that becomes 0 is below 2^-18.8 of the tile's.
//
// In all modes the row sum, and with it the LSE, is that of weights before they are rounded. A
// weight that rounds to 0 leaves the result, where its value is small next to others of its tile,
// but not the row sum.
//
// All in fp32, in this order, rounded to nearest even:
//
//   shift    keys i * seqlen_k / n, i < n = min(64, seqlen_k); a value that is not finite counts as
//            0. Eight partial sums, of i = g, g + 8, ..., are each added up in order, and then
//            added in order. Times 1 / n. A mean that is not finite becomes 0.
//   scale    amax / 127, computed as amax * (1 / 127), over the values that it covers. 0 if amax is
//            less than kMin. NaN if any value is not finite; then all products with it are NaN.
//   x8       the integer nearest to x * (127 / amax), where the product is not rounded before; 0
//            for a scale of 0 or NaN
//   v8       likewise with (127 / of_tile) * (e / 8). Values that are not finite do not count in
//            of_tile, and make 8 / e NaN, and with it their weights
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"

namespace cutlass_attn::quantize {

inline constexpr int kTileKeys = 64;    // keys that share a scale
inline constexpr int kGroups = 4;       // groups of a tile, each with a scale
inline constexpr int kSamples = 64;     // the most keys that the shift is the mean of
inline constexpr int kPartialSums = 8;  // of these keys
inline constexpr float kMin = 0x1p-100f;
// Adding an integer of up to 22 bits and a sign to this puts the integer into the low bits of the
// sum.
inline constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
inline constexpr uint32_t kMagicBits = 0x4B400000u;

// Lower bound for a key's largest value, relative to that of the tile.
inline constexpr float kMinOfTile = 1.0f / 32.0f;
inline constexpr float kFp8Sum = 448.0f;  // the sum of a row's P' in a tile, before rounding

CA_HOST_DEVICE constexpr int group_of(int key) { return key % 8 / 2; }

// The number of sampled keys, and which they are.
CA_HOST_DEVICE constexpr int samples_of(int seqlen_k) {
  return seqlen_k < kSamples ? seqlen_k : kSamples;
}
CA_HOST_DEVICE constexpr int sampled_key(int i, int seqlen_k) {
  static_assert(kSamples == 64);  // a division by a number that is not a constant takes a call
  return seqlen_k < kSamples ? i : int(int64_t(i) * seqlen_k >> 6);
}

// The bits of |x|: ordered like the magnitudes, with Inf and NaN the largest.
CA_HOST_DEVICE uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

CA_HOST_DEVICE float finite_or_zero(float x) { return magnitude_bits(x) < 0x7f800000u ? x : 0.0f; }

struct Factors {
  float scale;
  float inverse;  // in int8: 127 / amax
};

// 127 / x for x >= kMin, rounded correctly. On the GPU this is a division without its handling of
// overflow and underflow: the division itself is a call, for which the compiler keeps convergence
// barriers in every main loop.
CA_HOST_DEVICE float divide_127(float x) {
#if defined(__CUDA_ARCH__)
  float const shrink = x >= 1.0f ? 0x1p-64f : 1.0f;  // otherwise the reciprocal might be subnormal
  x *= shrink;
  float r = fast_reciprocal(x);
  r = fmaf(fmaf(-x, r, 1.0f), r, r);
  float q = 127.0f * r;
  q = fmaf(fmaf(-x, q, 127.0f), r, q);
  q = fmaf(fmaf(-x, q, 127.0f), r, q);
  return q * shrink;
#else
  return 127.0f / x;
#endif
}

// The factors for an amax with these bits.
CA_HOST_DEVICE Factors factors_of(uint32_t amax_bits) {
  float const amax = bits_float(amax_bits);
  if (amax_bits >= 0x7f800000u) return {bits_float(0x7fc00000u), 0.0f};
  if (amax < kMin) return {0.0f, 0.0f};
  return {amax * (1.0f / 127.0f), divide_127(amax)};
}

// The int8 in the low 8 bits of the result.
CA_HOST_DEVICE uint32_t to_int8(float x, float inverse) {
  return float_bits(fmaf(x, inverse, kMagic));
}

// Bytes that can be read behind the scales and the shift, where a tile has fewer columns than its
// kernel.
inline constexpr int kReadableBytes = 256;

// The scales of a tile of 64 keys in k8.
struct alignas(16) KeyScales {
  float k[kGroups];

  CA_HOST_DEVICE float& of_group(int t) { return k[t]; }
};
// The scales of a tile in k8 and v8. All scales that lane t of a quad uses are together, so that a
// thread has one address. Group t has keys 2 t, 2 t + 1 and those 8, 16, ... further on.
struct alignas(16) KeyValueScales {
  static constexpr bool kIsFp8 = false;
  struct alignas(16) OfLane {
    float k;
    float v;                                     // of_tile / 127
    alignas(16) uint32_t folded[kTileKeys / 8];  // 8 / e in fp16, word n: keys 8 n + 2 t and + 1
  };
  OfLane lanes[kGroups];

  CA_HOST_DEVICE float& of_group(int t) { return lanes[t].k; }
};

// The scales of a tile in k8, and in v8 in e4m3.
struct alignas(16) KeyFp8Scales {
  static constexpr bool kIsFp8 = true;
  float k[kGroups];
  float v;

  CA_HOST_DEVICE float& of_group(int t) { return k[t]; }
  // Called by as many threads as there are groups.
  CA_HOST_DEVICE void set_v(int lane, float scale) {
    if (lane == 0) v = scale;
  }
};

// The same, where all that lane t of a quad uses is together.
struct alignas(64) KeyFp8LaneScales {
  static constexpr bool kIsFp8 = true;
  struct alignas(16) OfLane {
    float k, v;
  };
  OfLane lanes[kGroups];

  CA_HOST_DEVICE float& of_group(int t) { return lanes[t].k; }
  CA_HOST_DEVICE void set_v(int lane, float scale) { lanes[lane].v = scale; }
};

// kFp8: the factors of a tile's values, from their largest magnitude.
CA_HOST_DEVICE Factors fp8_factors_of(float of_tile) {
  if (of_tile < kMin) return {0.0f, 0.0f};
  uint32_t const exponent = float_bits(of_tile) & 0x7f800000u;
  return {bits_float(exponent - (6u << 23)), bits_float((260u << 23) - exponent)};
}

// The value to be rounded to e4m3; an infinity becomes NaN.
CA_HOST_DEVICE float to_fp8_value(float x, float inverse) { return fmaf(x, inverse, x - x); }

// kInt8: the factors of a key's values.
struct ValueFactors {
  float inverse;  // factor of the values
  float folded;   // 8 / e
};

// From the bits of the key's largest magnitude, and the largest magnitude of the tile.
CA_HOST_DEVICE ValueFactors value_factors_of(uint32_t amax_bits, float of_tile) {
  if (amax_bits >= 0x7f800000u) return {0.0f, bits_float(0x7fc00000u)};
  float const amax = fmaxf(bits_float(amax_bits), of_tile * kMinOfTile);
  float const ratio = factors_of(float_bits(amax)).inverse * (of_tile * (8.0f / 127.0f));
  uint32_t const eighths = ratio < 8.0f ? 8 : (ratio < 255.0f ? uint32_t(ratio) : 255);
  return {factors_of(float_bits(of_tile)).inverse * (float(eighths) * 0.125f),
          divide_127(float(eighths)) * (8.0f / 127.0f)};
}

}  // namespace cutlass_attn::quantize
