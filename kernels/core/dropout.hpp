// Dropout of softmax weights: which weights are dropped, and the factor of the kept weights.
//
// Whether a weight is kept depends only on the seed, the offset and its (batch, head, query, key),
// by Philox4x32 (Salmon et al., SC 2011). So every kernel and every tile shape draws one mask,
// forward and backward. Once per call, ten rounds turn seed and offset into a state. A draw is
// seven rounds, the fewest that pass BigCrush, of a counter combined with the state:
//
//   state    philox10(counter (offset low, offset high, 0, 0), key (seed low, seed high))
//   draw     philox7(counter (key & ~25, query & ~8, batch * num_heads_q + head, 0) ^ state, key 0)
//
// Where a call is a part of a larger one, heads, queries and keys count in the larger one.
//
// The Philox key of draws is a constant, so the keys of its rounds are immediate operands.
//
// One draw covers the 16 weights of queries q and q + 8 with keys k, k + 1, and the keys 8, 16 and
// 24 further on. A thread holds exactly these elements of four neighbouring m16n8 accumulators.
// Words 0 and 2 belong to query q with keys k and k + 16; words 1 and 3 belong to query q + 8. The
// low half of a word is the number of k, the high half that of k + 1. For keys 8 further on, the
// number's high byte is the low byte of that half, and its low byte is the high byte of that half
// of the other query's word. (So the four numbers are the four byte rotations of 32 bits. No two of
// them share the 7 bits that decide all but one in 128 weights. Neighbouring numbers share a byte;
// the correlation of their weights is at most 1 / 128, and 0 where p is a multiple of 1 / 128.)
//
// A number has 15 bits. If it is less than 2^15 min(p, 1 - p), rounded, the outcome is the rarer
// one: dropped for p up to 1/2, kept above. Kept weights are divided by the share of weights that
// is really kept, not by 1 - p. So p is rounded to a multiple of 2^-15, but the expectation is
// exact.
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct PhiloxWords {
  uint32_t word[4];
};

template <int kRounds>
CA_HOST_DEVICE PhiloxWords philox4x32(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  auto const multiply = [](uint32_t x, uint32_t y, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__)
    // For a C++ product, nvcc 13.0 adds a 0 to the high half: one extra instruction of four.
    asm("{\n.reg .b64 t;\nmul.wide.u32 t, %2, %3;\nmov.b64 {%0, %1}, t;\n}"
        : "=r"(low), "=r"(high)
        : "r"(x), "r"(y));
#else
    uint64_t const product = uint64_t(x) * y;
    low = uint32_t(product), high = uint32_t(product >> 32);
#endif
  };
  uint32_t (&c)[4] = counter.word;
  CA_UNROLL
  for (int round = 0; round < kRounds; ++round) {
    uint32_t low[2], high[2];
    multiply(c[0], 0xD2511F53u, low[0], high[0]);
    multiply(c[2], 0xCD9E8D57u, low[1], high[1]);
    counter = {{high[1] ^ c[1] ^ key0, low[1], high[0] ^ c[3] ^ key1, low[0]}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// How many of the 2^15 numbers give the rarer outcome.
CA_HOST_DEVICE uint32_t dropout_threshold(float p) {
  return uint32_t((p > 0.5f ? 1.0f - p : p) * 32768.0f + 0.5f);
}

// Share of weights that are kept; 1 if none is kept, so that it can be a divisor.
CA_HOST_DEVICE float kept_share(float p) {
  float const rarer = float(dropout_threshold(p)) * (1.0f / 32768.0f);
  if (p <= 0.5f) return 1.0f - rarer;
  return rarer > 0.0f ? rarer : 1.0f;
}

// The dropout of one call, as kernels use it. What a draw needs is 32 bytes that two loads read
// from shared memory: as single words, they would cost registers where kernels have none left.
struct alignas(16) DropoutMask {
  PhiloxWords state = {};
  // Of the larger call, if this one is a part of one.
  uint32_t num_heads = 0;
  uint32_t first_head = 0, first_query = 0, first_key = 0;
  uint32_t thresholds = 0;  // threshold, in both halves of a word
  uint32_t flip = ~0u;      // ~0: a number below the threshold drops; 0: it keeps
  float kept_scale = 1.0f;

  // Reads rng_state only if the call has dropout.
  CA_HOST_DEVICE explicit DropoutMask(Problem const& p) : num_heads(uint32_t(p.num_heads_q)) {
    if (p.dropout.p == 0.0f) return;
    thresholds = dropout_threshold(p.dropout.p) * 0x10001u;
    flip = p.dropout.p > 0.5f ? 0u : ~0u;
    kept_scale = 1.0f / kept_share(p.dropout.p);
    uint64_t const seed = p.dropout.rng_state[0], at = p.dropout.rng_state[1];
    state = philox4x32<10>({{uint32_t(at), uint32_t(at >> 32), 0, 0}}, uint32_t(seed),
                           uint32_t(seed >> 32));
    if (!p.dropout.is_part) return;
    uint64_t const* const part = p.dropout.rng_state + 2;
    num_heads = uint32_t(part[0]);
    first_head = uint32_t(part[1]);
    first_query = uint32_t(part[2]) & ~15u;  // whole draws
    first_key = uint32_t(part[3]) & ~31u;
  }

  CA_HOST_DEVICE bool is_active() const { return thresholds != 0 || flip == 0; }

  // The draw that covers the weight of this query and key.
  CA_HOST_DEVICE PhiloxWords draw(int b, int h, int q, int key) const {
    uint32_t const head = uint32_t(b) * num_heads + first_head + uint32_t(h);
    uint32_t const query = first_query + uint32_t(q), at = first_key + uint32_t(key);
    uint32_t const(&s)[4] = state.word;
    return philox4x32<7>({{(at & ~25u) ^ s[0], (query & ~8u) ^ s[1], head ^ s[2], s[3]}}, 0, 0);
  }

  // The number of a weight. own: its query's word of the draw; other: the word of the other query.
  CA_HOST_DEVICE static uint32_t number(uint32_t own, uint32_t other, int key) {
    own >>= key % 2 * 16, other >>= key % 2 * 16;
    return (key / 8 % 2 ? own << 8 | (other >> 8 & 0xffu) : own) & 0x7fffu;
  }

  // The factor of the weight with this number.
  CA_HOST_DEVICE float factor(uint32_t number) const {
    return (number < (thresholds & 0xffffu)) == (flip == 0) ? kept_scale : 0.0f;
  }
  CA_HOST_DEVICE float factor(int b, int h, int q, int key) const {
    PhiloxWords const words = draw(b, h, q, key);
    bool const is_second = q / 8 % 2, is_upper = key / 16 % 2;
    uint32_t const first = is_upper ? words.word[2] : words.word[0];
    uint32_t const second = is_upper ? words.word[3] : words.word[1];
    return factor(number(is_second ? second : first, is_second ? first : second, key));
  }
};

}  // namespace cutlass_attn
