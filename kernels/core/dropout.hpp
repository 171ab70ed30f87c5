// Dropout of softmax weights: which ones, and what the others are multiplied by.
//
// Whether a weight is kept depends on the seed, the offset and its (batch, head, query, key) alone,
// by Philox4x32-10 (Salmon et al., SC 2011), so that every kernel and every tile shape draws the
// same mask, forward and backward. Each weight has 16 random bits. One draw serves the eight keys
// of a row that a thread holds of four neighbouring m16n8 accumulators: with k0 = key rounded down
// to a multiple of 32 and t = key % 8 / 2, word i is for the keys k0 + 8 i + 2 t (low half) and k0
// + 8 i + 2 t + 1 (high half).
//
//   key      (seed low, seed high ^ offset high)
//   counter  (k0 / 8 + t, query, batch * num_heads_q + head, offset low)
#pragma once

#include "core/macros.hpp"
#include "core/problem.hpp"

namespace cutlass_attn {

struct PhiloxWords {
  uint32_t word[4];
};

CA_HOST_DEVICE PhiloxWords philox4x32_10(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  uint32_t (&c)[4] = counter.word;
  CA_UNROLL
  for (int round = 0; round < 10; ++round) {
    uint64_t const a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    counter = {{uint32_t(b >> 32) ^ c[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key1,
                uint32_t(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// What a kernel asks of a call's dropout.
struct DropoutMask {
  uint32_t threshold = 0;  // of 2^16: a weight is dropped if its bits are below
  float kept_scale = 1.0f;
  uint32_t key0 = 0, key1 = 0, offset = 0;
  int32_t num_heads = 0;

  // Reads rng_state if there is any dropout.
  CA_HOST_DEVICE explicit DropoutMask(Problem const& p) : num_heads(p.num_heads_q) {
    if (p.dropout.p == 0.0f) return;
    threshold = uint32_t(p.dropout.p * 65536.0f + 0.5f);
    // By the probability that the threshold stands for, so that no bias is left.
    kept_scale = threshold < 65536u ? 65536.0f / float(65536u - threshold) : 0.0f;
    uint64_t const seed = p.dropout.rng_state[0], at = p.dropout.rng_state[1];
    key0 = uint32_t(seed);
    key1 = uint32_t(seed >> 32) ^ uint32_t(at >> 32);
    offset = uint32_t(at);
  }

  CA_HOST_DEVICE bool is_active() const { return threshold != 0; }

  // The random bits of the keys (key & ~31) + 8 i + (key & 6) + {0, 1} for i = 0 .. 3.
  CA_HOST_DEVICE PhiloxWords draw(int b, int h, int q, int key) const {
    uint32_t const keys = uint32_t(key) / 32 * 4 + uint32_t(key) % 8 / 2;
    return philox4x32_10(
        {{keys, uint32_t(q), uint32_t(b) * uint32_t(num_heads) + uint32_t(h), offset}}, key0, key1);
  }

  // The factor of the weight of `key`, with the words drawn for it, or the one that has its bits.
  CA_HOST_DEVICE float factor(PhiloxWords const& words, int key) const {
    return factor(words.word[key % 32 / 8], key);
  }
  CA_HOST_DEVICE float factor(uint32_t word, int key) const {
    return (word >> (key % 2 * 16) & 0xffffu) < threshold ? 0.0f : kept_scale;
  }
  CA_HOST_DEVICE float factor(int b, int h, int q, int key) const {
    return factor(draw(b, h, q, key), key);
  }
};

}  // namespace cutlass_attn
