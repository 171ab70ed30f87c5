// Rounds K to int8, before the kernel that multiplies in 8 bits. core/quantize.hpp defines the
// rounding, quantized/params.hpp the destination.
//
// Grid:      one block per several neighbouring tiles of 64 keys of a KV head.
// Block:     four warps. They first compute the shift of the head, from 64 of its keys. Every block
//            of the head does: those rows come from L2.
// Warp:      warp t has group t of a tile: 16 keys, in neighbouring pairs. Shuffles find their
//            largest value, so there are no barriers from here on.
// Thread:    16 columns of a key at a time: two loads of 16 bytes, and later one store.
// Shared:    partial sums of the shift, and the shift.
#pragma once

#include <cute/config.hpp>

#include "core/vector.hpp"
#include "quantized/params.hpp"
#include "tile/fragment.hpp"
#include "tile/no_launch.hpp"

namespace cutlass_attn {

// Rows of K or V of a head, in the call's operand.
template <class Element>
struct SourceRows {
  Element const* first;
  int64_t row_stride;
  int seqlen, head_dim;
  bool is_aligned;  // whether all rows are aligned to 16 bytes

  template <class Params>
  CUTE_DEVICE SourceRows(Params const& params, Operand const& t, int head_dim,
                         typename Params::Head const& head)
      : SourceRows(params.key_tiles.template source<Element>(params.problem, t, head), t.row_stride,
                   params.key_tiles.seqlen(params.problem, head), head_dim) {}

  CUTE_DEVICE SourceRows(Element const* first, int64_t row_stride, int seqlen, int head_dim)
      : first(first), row_stride(row_stride), seqlen(seqlen), head_dim(head_dim) {
    is_aligned = (reinterpret_cast<uint64_t>(first) | uint64_t(row_stride * 2)) % 16 == 0;
  }

  // Loads 16 or 8 columns of a row, starting at a multiple of 8; zeros beyond the operand.
  // kIsAligned is a constant: otherwise each load would be in a branch, and the next would wait for
  // it.
  template <bool kIsAligned, int kWords>
  CUTE_DEVICE void load(int row, int column, uint32_t (&words)[kWords]) const {
    CUTE_UNROLL
    for (int v = 0; v < kWords; v += 4) {
      CUTE_UNROLL
      for (int i = v; i < v + 4; ++i) words[i] = 0;
      if (row >= seqlen || column + v * 2 >= head_dim) continue;
      Element const* const from = first + row * row_stride + column + v * 2;
      if constexpr (kIsAligned) {
        auto const vector = *reinterpret_cast<Vector16 const*>(from);
        __builtin_memcpy(words + v, &vector, sizeof vector);
      } else {
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) words[v + i / 2] |= uint32_t(from[i].raw()) << i % 2 * 16;
      }
    }
  }
};

// Element i of the words from load().
template <class Element>
CUTE_DEVICE float element_of(uint32_t const* words, int i) {
  return element_to_float<Element>(uint16_t(words[i / 2] >> i % 2 * 16));
}

CUTE_DEVICE void store_vector(char* to, uint32_t const (&words)[4]) {
  *reinterpret_cast<Vector16*>(to) = Vector16{uint64_t(words[0]) | uint64_t(words[1]) << 32,
                                              uint64_t(words[2]) | uint64_t(words[3]) << 32};
}

template <class Element, int kHeadDim, class Params_ = QuantizedParams>
struct QuantizeKeys {
  using Params = Params_;
  using Head = typename Params::Head;
  using Tiles = QuantizedTiles<Head>;
  using Keys = SourceRows<Element>;
  static constexpr int kThreads = Params::kPrePostThreads;
  static constexpr int kSmemBytes = Params::kPrePostSmemBytes;
  static constexpr int kChunks = kHeadDim / 16;  // per key, 16 columns each
  static constexpr int kWarpKeys = quantize::kTileKeys / quantize::kGroups;
  static constexpr int kPieces = kWarpKeys * kChunks / 32;  // per thread, 16 columns of a key each
  static constexpr int kPartialSums = quantize::kPartialSums;
  static_assert(kThreads == 32 * quantize::kGroups && kWarpKeys * kChunks % 32 == 0);
  static_assert((kPartialSums + 1) * kHeadDim * int(sizeof(float)) <= kSmemBytes);

  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    run<Arch>(params, smem, Arch::block());
  }
  // Runs block `block` of the grid.
  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem, int block) {
    Tiles const own = params.template tiles_of_block<Arch>(block);
    if (Params::KeyTiles::kMayBeNone && own.first >= own.end) return;
    Keys const keys(params, params.source_k, params.problem.head_dim, own.head);
    if (keys.is_aligned) {
      round<Arch, true>(params, own, keys, reinterpret_cast<float*>(smem));
    } else {
      round<Arch, false>(params, own, keys, reinterpret_cast<float*>(smem));
    }
  }

  // Computes the shift, behind the partial sums in shared memory, in the order of shift_place().
  // Called by all threads.
  template <class Arch, bool kIsAligned>
  CUTE_DEVICE static float* shift_of(Params const& params, Tiles const& own, Keys const& keys,
                                     float* partial) {
    float* const shift = partial + kPartialSums * kHeadDim;
    add_up_samples<Arch, kIsAligned>(keys, partial);
    Arch::sync();  // partial sums full
    find_shift<Arch>(params, own, keys, partial, shift);
    Arch::sync();  // shift full
    return shift;
  }

  // Order of the shift: lanes read four columns at a time of neighbouring chunks, which must come
  // from different banks.
  CUTE_DEVICE static int shift_place(int chunk, int column) {
    return column / 4 * (kHeadDim / 4) + chunk * 4 + column % 4;
  }

 private:
  template <class Arch, bool kIsAligned>
  CUTE_DEVICE static void round(Params const& params, Tiles const& own, Keys const& keys,
                                float* partial) {
    float const* const shift = shift_of<Arch, kIsAligned>(params, own, keys, partial);
    CUTE_NO_UNROLL
    for (int tile = own.first; tile < own.end; ++tile) {
      round_tile<Arch, kIsAligned>(params, own.head, tile, keys, shift);
    }
  }

  template <class Arch, bool kIsAligned>
  CUTE_DEVICE static void round_tile(Params const& params, Head const& head, int tile,
                                     Keys const& keys, float const* shift) {
    int const group = Arch::thread() / 32, lane = Arch::thread() % 32;
    int const first_key = tile * quantize::kTileKeys;
    uint32_t words[kPieces][8];
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      Piece const piece(i, group, lane);
      keys.template load<kIsAligned>(first_key + piece.key, piece.chunk * 16, words[i]);
    }
    float x[kPieces][16];
    uint32_t amax = 0;
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      Piece const piece(i, group, lane);
      uint32_t of_piece = 0;
      CUTE_UNROLL
      for (int d = 0; d < 16; ++d) {
        x[i][d] = element_of<Element>(words[i], d) - shift[shift_place(piece.chunk, d)];
        uint32_t const magnitude = quantize::magnitude_bits(x[i][d]);
        of_piece = magnitude > of_piece ? magnitude : of_piece;
      }
      if (first_key + piece.key >= keys.seqlen) of_piece = 0;
      amax = of_piece > amax ? of_piece : amax;
    }
    CUTE_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      uint32_t const other = Arch::shuffle_xor(amax, mask);
      amax = other > amax ? other : amax;
    }
    quantize::Factors const factors = quantize::factors_of(amax);
    if (lane == 0) params.scales_of(head, tile)->of_group(group) = factors.scale;
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      Piece const piece(i, group, lane);
      if (piece.chunk * 16 >= params.columns) continue;
      int const key = first_key + piece.key;
      float const inverse = key < keys.seqlen ? factors.inverse : 0.0f;
      uint32_t packed[4];
      CUTE_UNROLL
      for (int t = 0; t < 4; ++t) {
        uint32_t bytes[4];
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          bytes[e] = quantize::to_int8(x[i][permuted_column(4 * t + e)], inverse);
        }
        packed[t] = Arch::pack_bytes(bytes[0], bytes[1], bytes[2], bytes[3]);
      }
      store(params, head, key, piece.chunk, packed);
    }
  }

  // Key of the tile, and columns, of piece i of a thread. Neighbouring lanes have neighbouring
  // columns.
  struct Piece {
    int key, chunk;
    CUTE_DEVICE Piece(int i, int group, int lane) {
      int const place = i * 32 + lane, number = place / kChunks;  // index among the group's keys
      key = number / 2 * 8 + group * 2 + number % 2;
      chunk = place % kChunks;
    }
  };

  // Eight partial sums, of up to eight samples each, for all columns.
  template <class Arch, bool kIsAligned>
  CUTE_DEVICE static void add_up_samples(Keys const& keys, float* partial) {
    constexpr int kVectors = kHeadDim / 8, kEach = quantize::kSamples / kPartialSums;
    int const samples = quantize::samples_of(keys.seqlen);
    for (int place = Arch::thread(); place < kVectors * kPartialSums; place += kThreads) {
      int const sum = place / kVectors, column = place % kVectors * 8;
      uint32_t words[kEach][4];
      CUTE_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const sample = sum + i * kPartialSums;
        // Rows beyond the last key read as zeros.
        int const key = sample < samples ? quantize::sampled_key(sample, keys.seqlen) : keys.seqlen;
        keys.template load<kIsAligned>(key, column, words[i]);
      }
      float total[8] = {};
      CUTE_UNROLL
      for (auto const& sample : words) {
        CUTE_UNROLL
        for (int d = 0; d < 8; ++d) {
          total[d] += quantize::finite_or_zero(element_of<Element>(sample, d));
        }
      }
      CUTE_UNROLL
      for (int d = 0; d < 8; ++d) partial[sum * kHeadDim + column + d] = total[d];
    }
  }

  template <class Arch>
  CUTE_DEVICE static void find_shift(Params const& params, Tiles const& own, Keys const& keys,
                                     float const* partial, float* shift) {
    float const factor = 1.0f / float(quantize::samples_of(keys.seqlen));
    for (int d = Arch::thread(); d < kHeadDim; d += kThreads) {
      float total = partial[d];
      CUTE_UNROLL
      for (int i = 1; i < kPartialSums; ++i) total += partial[i * kHeadDim + d];
      float const mean = quantize::finite_or_zero(total * factor);
      shift[shift_place(d / 16, d % 16)] = mean;
      if (own.first == 0 && d < params.columns) params.shift_of(own.head)[d] = mean;
    }
  }

  CUTE_DEVICE static void store(Params const& params, Head const& head, int key, int chunk,
                                uint32_t const (&words)[4]) {
    Operand const& k8 = params.problem.k;  // elements of two bytes
    int64_t const row = params.key_tiles.number(head, 0) * quantize::kTileKeys + key;
    char* const to = static_cast<char*>(k8.data) + row * params.columns + chunk * 16;
    store_vector(to, words);
  }
};

}  // namespace cutlass_attn
