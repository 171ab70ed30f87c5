// Rounds K to int8, before the kernel that multiplies in 8 bits: core/quantize.hpp says how, and
// sm80/quantized_params.hpp where it goes.
//
// Grid:      a block for every tile of 64 keys of a KV head.
// Block:     four warps. First the shift of the head, from 64 of its keys, which all blocks of the
//            head work out for themselves: those rows come from L2.
// Warp:      group t of the tile is warp t's: 16 keys, in pairs next to each other, whose largest
//            value is a matter of shuffles.
// Thread:    16 columns of a key at a time: two loads of 16 bytes, and later one store.
// Shared:    partial sums of the shift, and the shift.
#pragma once

#include <cute/config.hpp>

#include "sm80/quantized_params.hpp"
#include "tile/fragment.hpp"

namespace cutlass_attn::sm80 {

// The rows of K or V of a head, as the call has them.
template <class Element>
struct SourceRows {
  Element const* first;
  int64_t row_stride;
  int seqlen, head_dim;
  bool is_aligned;  // to 16 bytes, all rows

  // head: of all batch entries.
  template <class Params>
  CUTE_DEVICE SourceRows(Params const& params, Operand const& t, int head_dim, int head)
      : row_stride(t.row_stride), seqlen(params.problem.seq_k.seqlen), head_dim(head_dim) {
    int const batch = params.by_heads_kv(head);
    int const head_kv = head - batch * params.problem.num_heads_kv;
    first = static_cast<Element const*>(t.data) + batch * t.batch_stride + head_kv * t.head_stride;
    is_aligned = (reinterpret_cast<uint64_t>(first) | uint64_t(row_stride * 2)) % 16 == 0;
  }

  // Eight columns of a row, from a multiple of 8 on; zeros where there are none.
  CUTE_DEVICE void load(int row, int column, uint32_t (&words)[4]) const {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = 0;
    if (row >= seqlen || column >= head_dim) return;
    Element const* const from = first + row * row_stride + column;
    if (is_aligned) {
      auto const vector = *reinterpret_cast<cute::uint128_t const*>(from);
      __builtin_memcpy(words, &vector, sizeof words);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) words[i / 2] |= uint32_t(from[i].raw()) << i % 2 * 16;
    }
  }

  // The same as numbers, and 16 or 8 columns.
  template <int kColumns>
  CUTE_DEVICE void load(int row, int column, float (&x)[kColumns]) const {
    CUTE_UNROLL
    for (int v = 0; v < kColumns / 8; ++v) {
      uint32_t words[4];
      load(row, column + v * 8, words);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        x[v * 8 + i] = element_to_float<Element>(uint16_t(words[i / 2] >> i % 2 * 16));
      }
    }
  }
};

CUTE_DEVICE void store_vector(char* to, uint32_t const (&words)[4]) {
  *reinterpret_cast<cute::uint128_t*>(to) = cute::uint128_t{
      uint64_t(words[0]) | uint64_t(words[1]) << 32, uint64_t(words[2]) | uint64_t(words[3]) << 32};
}

template <class Element, int kHeadDim, class Params_ = QuantizedParams>
struct QuantizeKeys {
  using Params = Params_;
  using Keys = SourceRows<Element>;
  static constexpr int kThreads = Params::kAsideThreads;
  static constexpr int kSmemBytes = Params::kAsideSmemBytes;
  static constexpr int kChunks = kHeadDim / 16;  // of 16 columns, of a key
  static constexpr int kWarpKeys = quantize::kTileKeys / quantize::kGroups;
  static constexpr int kPieces = kWarpKeys * kChunks / 32;  // of a thread: 16 columns of a key
  static constexpr int kPartialSums = quantize::kPartialSums;
  static_assert(kThreads == 32 * quantize::kGroups && kWarpKeys * kChunks % 32 == 0);
  static_assert((kPartialSums + 1) * kHeadDim * int(sizeof(float)) <= kSmemBytes);

  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    int const head = params.by_tiles(Arch::block()), tile = Arch::block() - head * params.tiles;
    Keys const keys(params, params.source_k, params.problem.head_dim, head);
    float* const partial = reinterpret_cast<float*>(smem);  // (sum, column)
    float* const shift = partial + kPartialSums * kHeadDim;
    add_up_samples<Arch>(keys, partial);
    Arch::sync();  // partial sums full
    find_shift<Arch>(keys, partial, shift);
    Arch::sync();  // shift full
    if (tile == 0) {
      for (int d = Arch::thread(); d < params.columns; d += kThreads) {
        params.shift_of(head)[d] = shift[d];
      }
    }

    int const group = Arch::thread() / 32, lane = Arch::thread() % 32;
    float x[kPieces][16];
    uint32_t amax = 0;
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      Piece const piece(i, group, lane);
      int const key = tile * quantize::kTileKeys + piece.key;
      keys.load(key, piece.chunk * 16, x[i]);
      CUTE_UNROLL
      for (int d = 0; d < 16; ++d) {
        x[i][d] = key < keys.seqlen ? x[i][d] - shift[piece.chunk * 16 + d] : 0.0f;
        uint32_t const magnitude = quantize::magnitude_bits(x[i][d]);
        amax = magnitude > amax ? magnitude : amax;
      }
    }
    CUTE_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      uint32_t const other = Arch::shuffle_xor(amax, mask);
      amax = other > amax ? other : amax;
    }
    quantize::Factors const factors = quantize::factors_of(amax);
    if (lane == 0) params.scales_of(head, tile)->k[group] = factors.scale;
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      Piece const piece(i, group, lane);
      if (piece.chunk * 16 >= params.columns) continue;
      uint32_t words[4];
      CUTE_UNROLL
      for (int t = 0; t < 4; ++t) {
        uint32_t bytes[4];
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          bytes[e] = quantize::to_int8(x[i][permuted_column(4 * t + e)], factors.inverse);
        }
        words[t] = Arch::pack_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
      }
      store(params, head, tile * quantize::kTileKeys + piece.key, piece.chunk, words);
    }
  }

 private:
  // Which key of the tile, and which columns, piece i of a thread is. Lanes next to each other have
  // columns next to each other.
  struct Piece {
    int key, chunk;
    CUTE_DEVICE Piece(int i, int group, int lane) {
      int const place = i * 32 + lane, number = place / kChunks;  // of the group's keys
      key = number / 2 * 8 + group * 2 + number % 2;
      chunk = place % kChunks;
    }
  };

  // Eight sums of up to eight samples, of all columns.
  template <class Arch>
  CUTE_DEVICE static void add_up_samples(Keys const& keys, float* partial) {
    constexpr int kVectors = kHeadDim / 8;
    int const samples = quantize::samples_of(keys.seqlen);
    for (int place = Arch::thread(); place < kVectors * kPartialSums; place += kThreads) {
      int const sum = place / kVectors, column = place % kVectors * 8;
      float total[8] = {};
      CUTE_UNROLL
      for (int i = 0; i < quantize::kSamples / kPartialSums; ++i) {
        int const sample = sum + i * kPartialSums;
        float x[8];
        // Beyond the last key there are zeros.
        int const key = sample < samples ? quantize::sampled_key(sample, keys.seqlen) : keys.seqlen;
        keys.load(key, column, x);
        CUTE_UNROLL
        for (int d = 0; d < 8; ++d) total[d] += quantize::finite_or_zero(x[d]);
      }
      CUTE_UNROLL
      for (int d = 0; d < 8; ++d) partial[sum * kHeadDim + column + d] = total[d];
    }
  }

  template <class Arch>
  CUTE_DEVICE static void find_shift(Keys const& keys, float const* partial, float* shift) {
    float const factor = 1.0f / float(quantize::samples_of(keys.seqlen));
    for (int d = Arch::thread(); d < kHeadDim; d += kThreads) {
      float total = partial[d];
      CUTE_UNROLL
      for (int i = 1; i < kPartialSums; ++i) total += partial[i * kHeadDim + d];
      shift[d] = quantize::finite_or_zero(total * factor);
    }
  }

  CUTE_DEVICE static void store(Params const& params, int head, int key, int chunk,
                                uint32_t const (&words)[4]) {
    Operand const& k8 = params.problem.k;  // of elements of two bytes
    int64_t const row = int64_t(head) * params.tiles * quantize::kTileKeys + key;
    char* const to = static_cast<char*>(k8.data) + row * params.columns + chunk * 16;
    store_vector(to, words);
  }
};

// For kernels that have a launch before them alone.
template <class Params_>
struct NoAside {
  static constexpr int kThreads = 32;
  static constexpr int kSmemBytes = 0;
  template <class Arch>
  CUTE_DEVICE static void run(Params_ const&, char*) {}
};

}  // namespace cutlass_attn::sm80
