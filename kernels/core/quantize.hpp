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
//   kInt8    v8 is int8 with a scale for each key, which is no less than 1/32 of the largest of its
//            tile. P takes these scales over before it is rounded: of a tile, with score' = score +
//            log(scale of the key / largest), P' = round(255 exp(score' - largest score' of the row
//            in the tile)) has 8 bits without a sign. The row sum is that of P' times largest /
//            scale. A value that is much larger than others of its tile, or much smaller with a far
//            larger weight (an attention sink), costs these no bits then.
//   kFp8     v8 is e4m3 with a scale for each column, such that the largest of all keys is
//            kFp8Value. P is e4m3, kFp8Weight where the row max is, which is updated when the
//            weights of one of four groups of 32 keys add up to more than kFp8Limit: nothing is
//            clipped, and fp16 holds sums of 64 products. The row sum is that of P rounded. Tiles
//            come last to first: a sink among the first keys is the last to join.
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

inline constexpr float kLeastOfTile = 1.0f / 32.0f;
inline constexpr float kFp8Weight = 28.0f, kFp8Value = 16.0f, kFp8Limit = 448.0f;

CA_HOST_DEVICE constexpr int group_of(int key) { return key % 8 / 2; }

// How many keys are sampled, and which.
CA_HOST_DEVICE constexpr int samples_of(int seqlen_k) {
  return seqlen_k < kSamples ? seqlen_k : kSamples;
}
CA_HOST_DEVICE constexpr int sampled_key(int i, int seqlen_k) {
  return int(int64_t(i) * seqlen_k / samples_of(seqlen_k));
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

}  // namespace cutlass_attn::quantize
