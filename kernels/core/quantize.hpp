// Products in 8 bits: how q and k are rounded to int8, for every kernel that does so.
//
// Quantize::kQk, S = softmax_scale * (q8 . k8) * scale_q * scale_k [+ softmax_scale * (q . shift)]:
//
//   shift    a vector of head_dim fp32 for each KV head of a batch entry: the mean of up to 64 of
//            its keys. It is subtracted from k, whose keys have much in common. What q . shift adds
//            to the logits of a row is the same for all its keys: softmax does not see it. It is
//            added where that is not so: before a softcap, next to a sink, and in the LSE.
//   k8       int8, of k - shift: a scale for each tile of 64 keys, counted from key 0, and each of
//            four groups of it: group t has the keys j with j % 8 / 2 == t. Those are what a thread
//            has of an m16n8 accumulator.
//   q8       int8, of q: a scale for each row.
//
// Quantize::kInt8 and kFp8 have the same S, and round P and V, too:
//
//   kInt8    v8 is int8 with a scale for each key: of_tile / 127 * 8 / e, where of_tile is the
//            largest magnitude of a tile of 64 keys, and e the largest integer from 8 to 255 for
//            which nothing is clipped. P takes 8 / e over before it is rounded: of a row and tile,
//            P' = round(255 w / largest w), w = exp(score) * 8 / e, has 8 bits without a sign. The
//            row sum is that of P' e / 8, an integer. A value that is much larger than others of
//            its tile, or much smaller with a far larger weight (an attention sink), costs these no
//            bits then. On a GPU w, 8 / e and 255 / largest are rounded to fp16 before, which moves
//            a few P' to the next integer.
//   kFp8     v8 is e4m3 with a scale for each tile of 64 keys, the power of 2 with which its
//            largest magnitude is from 64 on and below 128. P is e4m3, kFp8Weight where the row max
//            is, which is updated when a row's P of a tile adds up to kFp8Limit, the largest
//            number of e4m3, or more. So nothing is clipped, and fp16 holds what the products of 64
//            keys add up to, as it does here. The row sum is that of P, too. Tiles come last to
//            first: a sink among the first keys is the last to join.
//
// All in fp32, in this order; numbers are rounded to nearest even:
//
//   shift    keys i * seqlen_k / n, i < n = min(64, seqlen_k); a value that is not finite counts as
//            0. Eight partial sums, of i = g, g + 8, ..., are added up one after the other, and
//            then they are. Times 1 / n. A mean that is not finite is 0.
//   scale    amax / 127, computed as amax * (1 / 127), of the values it is for. 0 where amax is
//            less than kLeast. NaN where one of them is not finite: so are all products with it.
//   x8       the integer next to x * (127 / amax), the product not rounded before; 0 for a scale of
//            0 or NaN
//   v8       the same with (127 / of_tile) * (e / 8); values that are not finite count for no
//            of_tile, and make 8 / e NaN, which their weights take over
#pragma once

#include "core/macros.hpp"
#include "core/math.hpp"

namespace cutlass_attn::quantize {

inline constexpr int kTileKeys = 64;    // of a scale
inline constexpr int kGroups = 4;       // of a tile, each with a scale
inline constexpr int kSamples = 64;     // keys that the shift is the mean of, at most
inline constexpr int kPartialSums = 8;  // of them
inline constexpr float kLeast = 0x1p-100f;
// An integer of up to 22 bits and its sign, added to this, is the low bits of the sum.
inline constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
inline constexpr uint32_t kMagicBits = 0x4B400000u;

inline constexpr float kLeastOfTile =
    1.0f / 32.0f;  // a key's largest value counts as that at least
// 64 weights of the row max are below the limit: once updated, it need not be looked at again.
inline constexpr float kFp8Weight = 6.5f, kFp8Log2Weight = 2.7004397f, kFp8Limit = 448.0f;

CA_HOST_DEVICE constexpr int group_of(int key) { return key % 8 / 2; }

// How many keys are sampled, and which.
CA_HOST_DEVICE constexpr int samples_of(int seqlen_k) {
  return seqlen_k < kSamples ? seqlen_k : kSamples;
}
CA_HOST_DEVICE constexpr int sampled_key(int i, int seqlen_k) {
  static_assert(kSamples == 64);  // a division by a number that is not a constant takes a call
  return seqlen_k < kSamples ? i : int(int64_t(i) * seqlen_k >> 6);
}

// |x|, such that the larger of two is the larger integer, and what is not finite is the largest.
CA_HOST_DEVICE uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

CA_HOST_DEVICE float finite_or_zero(float x) { return magnitude_bits(x) < 0x7f800000u ? x : 0.0f; }

struct Factors {
  float scale;
  float inverse;  // 127 / amax
};

// 127 / x for an x from kLeast on, rounded correctly. On the GPU what a division does where nothing
// over- or underflows: the division itself is a call, for which the compiler keeps convergence
// barriers in every main loop.
CA_HOST_DEVICE float divide_127(float x) {
#if defined(__CUDA_ARCH__)
  float const shrink = x >= 1.0f ? 0x1p-64f : 1.0f;  // or the reciprocal might be subnormal
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

// Of an amax with these bits.
CA_HOST_DEVICE Factors factors_of(uint32_t amax_bits) {
  float const amax = bits_float(amax_bits);
  if (amax_bits >= 0x7f800000u) return {bits_float(0x7fc00000u), 0.0f};
  if (amax < kLeast) return {0.0f, 0.0f};
  return {amax * (1.0f / 127.0f), divide_127(amax)};
}

// The int8 in the low 8 bits.
CA_HOST_DEVICE uint32_t to_int8(float x, float inverse) {
  return float_bits(fmaf(x, inverse, kMagic));
}

// What a tile of 64 keys has beside k8.
struct alignas(16) KeyScales {
  float k[kGroups];

  CA_HOST_DEVICE float& of_group(int t) { return k[t]; }
};
// And beside v8. What lane t of a quad multiplies by is together, so that a thread has one address:
// group t of keys is 2 t, 2 t + 1 and those 8, 16, ... on.
struct alignas(16) KeyValueScales {
  struct alignas(16) OfLane {
    float k;
    float v;                                       // of_tile / 127
    alignas(16) uint32_t eighths[kTileKeys / 16];  // e: word b of 16 keys from 16 b on
    uint32_t folded[kTileKeys / 8];  // 8 / e in fp16: word n of the keys 8 n + 2 t and the next
  };
  OfLane lanes[kGroups];

  CA_HOST_DEVICE float& of_group(int t) { return lanes[t].k; }
};

// And with v8 in e4m3.
struct alignas(16) KeyFp8Scales {
  float k[kGroups];
  float v;

  CA_HOST_DEVICE float& of_group(int t) { return k[t]; }
};

// kFp8: of a tile's values, from their largest magnitude.
struct Fp8Factors {
  float scale;
  float inverse;
};
CA_HOST_DEVICE Fp8Factors fp8_factors_of(float of_tile) {
  if (of_tile < kLeast) return {0.0f, 0.0f};
  uint32_t const exponent = float_bits(of_tile) & 0x7f800000u;
  return {bits_float(exponent - (6u << 23)), bits_float((260u << 23) - exponent)};
}

// What is rounded to e4m3, where an infinity becomes NaN.
CA_HOST_DEVICE float to_fp8_value(float x, float inverse) { return fmaf(x, inverse, x - x); }

// kInt8: of a key's values.
struct ValueFactors {
  float inverse;     // what they are multiplied by
  float folded;      // 8 / e
  uint32_t eighths;  // e
};

// From the bits of their largest magnitude, and the largest of the tile.
CA_HOST_DEVICE ValueFactors value_factors_of(uint32_t amax_bits, float of_tile) {
  if (amax_bits >= 0x7f800000u) return {0.0f, bits_float(0x7fc00000u), 8};
  float const amax = fmaxf(bits_float(amax_bits), of_tile * kLeastOfTile);
  float const ratio = factors_of(float_bits(amax)).inverse * (of_tile * (8.0f / 127.0f));
  uint32_t const eighths = ratio < 8.0f ? 8 : (ratio < 255.0f ? uint32_t(ratio) : 255);
  return {factors_of(float_bits(of_tile)).inverse * (float(eighths) * 0.125f),
          divide_127(float(eighths)) * (8.0f / 127.0f), eighths};
}

}  // namespace cutlass_attn::quantize
