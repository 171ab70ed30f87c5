// Forward attention in nvcuda::wmma fragments: the rung between the scalar kernels and mma.sync.
//
// Grid:   one block per 16 * kWarps queries of a head.
// Block:  kWarps warps along M; a loop over tiles of kBlockN keys.
// Warp:   16 queries, all keys of a tile, the whole head dimension, in fragments of
//         kFragM x kFragN x 16.
// Fragments: Q and O for the whole call; S of a tile until it is stored.
// Shared: two cp.async buffers, one for K and one for V of a tile; per warp a strip, which holds
//         its queries, then S in fp32, then P and row factors:
//
//           cp.async   V(n) --+   K(n+1) -----------+
//           compute    S      |   softmax, O += P V |   S ...
//                    ^ K(n) landed  ^ V(n) landed
//
// The mapping of fragment elements to lanes is unspecified. So softmax works on the strip, where
// two lanes share a row: after S is stored and before P is loaded as a fragment. O stays in
// fragments nevertheless. To rescale it, a factor per row is stored to the strip as a matrix with
// equal columns, loaded as a fragment of O's type, and multiplied element by element: fragments of
// one type have one mapping.
//
// Rows in shared memory are padded by 16 bytes (S: by 32), so that the accesses of a warp hit
// different banks. A swizzle would need no padding, but a fragment load requires rows at a constant
// distance.
#pragma once

#include <cutlass/numeric_types.h>
#include <cstdint>
#include <type_traits>

#include "arch/wmma.hpp"
#include "core/epilogue.hpp"
#include "core/forward_params.hpp"
#include "core/mask.hpp"
#include "core/softmax.hpp"

namespace cutlass_attn::wmma {

// Head dimensions up to kHeadDim, multiples of 8.
template <class Element, int kHeadDim, int kBlockM_, int kBlockN_, int kWarps, int kFragM,
          int kFragN>
struct Forward : KernelDefaults {
  using Params = ForwardParams;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kBlockM / kWarps;  // queries per warp
  static constexpr int kK = 16;                   // depth of a fragment product
  static_assert(std::is_same_v<Element, cutlass::half_t>);
  static_assert(kRows == 16 && kRows % kFragM == 0, "two lanes share a row");
  static_assert(kHeadDim % kFragN == 0 && kHeadDim % kK == 0);
  static_assert(kBlockN % kFragN == 0 && kBlockN % kK == 0);

  // Row pitches in elements: leading dimensions of the fragment loads.
  static constexpr int kPitch = kHeadDim + 8;                                // of Q, K and V
  static constexpr int kPitchS = kBlockN + 8;                                // of S, in fp32
  static constexpr int kPitchP = kBlockN + 8;                                // of P
  static constexpr int kPitchFactor = kFragN + 8;                            // of factors, in fp32
  static constexpr int kColumnsO = kBlockN < kHeadDim ? kBlockN : kHeadDim;  // staged at a time

  // The strip of one warp. Q is loaded into fragments before S exists. All of S is in registers
  // before P and the factors overwrite it. After the last tile, O overwrites them, kColumnsO
  // columns at a time.
  union Strip {
    uint16_t q[kRows * kPitch];
    float s[kRows * kPitchS];
    struct {
      uint16_t p[kRows * kPitchP];
      float factor[kRows * kPitchFactor];
    } weights;
  };
  struct SharedStorage {
    alignas(128) uint16_t k[kBlockN * kPitch];
    alignas(128) uint16_t v[kBlockN * kPitch];
    alignas(128) Strip strips[kWarps];
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static constexpr int kMinBlocksPerSm = kHeadDim <= 64 ? 2 : 1;

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Tile<Score, Arch>(params, *reinterpret_cast<SharedStorage*>(smem)).run();
  }

 private:
  // The work of one thread of a block.
  template <class Score, class Arch>
  struct Tile {
    using Wmma = arch::Wmma<kFragM, kFragN>;
    using Queries = typename Wmma::A;
    using Weights = typename Wmma::A;
    using Keys = typename Wmma::template B<typename Wmma::ColMajor>;
    using Values = typename Wmma::template B<typename Wmma::RowMajor>;
    using Accumulator = typename Wmma::Accumulator;
    static constexpr int kRowBlocks = kRows / kFragM;
    static constexpr int kSteps = kHeadDim / kK;        // of Q K^T along the head dim
    static constexpr int kBlocksS = kBlockN / kFragN;   // blocks of S along N
    static constexpr int kBlocksO = kHeadDim / kFragN;  // blocks of O along N
    static constexpr int kRowKeys = kBlockN / 2;        // keys per lane, in one row

    Problem const& p;
    SharedStorage& shared;
    TileCoord const tile;
    IntervalMask const mask;
    KeyRange const visible_keys;  // keys that its queries see
    TileRange const range;        // tiles with these keys
    Score const score;
    float const log2_scale;
    int const lane;
    int const row0;  // the warp's first query in the tile
    Strip& strip;
    // This lane has row lane / 2 of the warp, and the first or last four of every eight keys.
    int const query;
    int const first_key;
    int lo, hi;  // the row's visible keys
    SoftmaxRow softmax;

    Queries q[kRowBlocks][kSteps];
    Accumulator o[kRowBlocks][kBlocksO];

    CUTE_DEVICE Tile(Params const& params, SharedStorage& shared)
        : p(params.problem),
          shared(shared),
          tile(p, params.scheduler, kBlockM, Arch::block()),
          mask(params.template mask<Score::kHasChunks>(tile.seq.lens(p))),
          visible_keys(mask.keys(tile.q_begin, tile.q_end)),
          range(mask.tiles(tile.q_begin, tile.q_end, kBlockN)),
          score(p, tile.seq.lens(p)),
          log2_scale(score.log2_scale()),
          lane(Arch::thread() % 32),
          row0(Arch::thread() / 32 * kRows),
          strip(shared.strips[Arch::thread() / 32]),
          query(tile.q_begin + row0 + lane / 2),
          first_key(lane % 2 * 4),
          lo(mask.lo(query)),
          hi(mask.hi(query)) {}

    CUTE_DEVICE void run() {
      load_queries();
      Arch::cp_async_commit_group();
      if (range.begin < range.end) load_keys(shared.k, p.k, range.begin, p.head_dim);
      Arch::cp_async_commit_group();
      Arch::template cp_async_wait_group<1>();
      Arch::sync_warp();  // the warp's Q full
      read_queries();
      clear_output();
      for (int n = range.begin; n < range.end; ++n) {
        Arch::template cp_async_wait_group<0>();
        Arch::sync();  // K full; previous V, and the strip, empty
        load_keys(shared.v, p.v, n, p.head_dim_v);
        Arch::cp_async_commit_group();
        product_qk();
        Arch::template cp_async_wait_group<0>();
        Arch::sync();  // V and S full; K empty
        if (n + 1 < range.end) load_keys(shared.k, p.k, n + 1, p.head_dim);
        Arch::cp_async_commit_group();
        float const rescale = softmax_weights(n);
        if (Arch::any(rescale != 1.0f)) scale_output(rescale);
        product_pv();
      }
      finish();
    }

    // Starts copying 8 elements. Without `inside` it reads nothing and writes zeros.
    CUTE_DEVICE static void load_vector(uint16_t* to, Element const* from, bool inside) {
      Arch::cp_async(Arch::smem_address(to), from, inside);
    }

    CUTE_DEVICE void load_queries() {
      constexpr int kVectors = kHeadDim / 8;
      Element const* const base = tile.seq.template queries<Element const>(p.q, tile.head_q);
      CUTE_UNROLL
      for (int i = lane; i < kRows * kVectors; i += 32) {
        int const row = i / kVectors, column = i % kVectors * 8;
        load_vector(strip.q + row * kPitch + column,
                    base + int64_t(tile.q_begin + row0 + row) * p.q.row_stride + column,
                    row0 + row < tile.rows && column < p.head_dim);
      }
    }

    // Starts the copy of tile n of K or V.
    CUTE_DEVICE void load_keys(uint16_t* to, Operand const& operand, int n, int columns) {
      constexpr int kVectors = kHeadDim / 8;
      DenseKv<Element> const source(p, tile.seq, operand, tile.head_kv);
      CUTE_UNROLL
      for (int i = Arch::thread(); i < kBlockN * kVectors; i += kThreads) {
        int const row = i / kVectors, column = i % kVectors * 8, key = n * kBlockN + row;
        load_vector(to + row * kPitch + column, source.row(key) + column,
                    visible_keys.contains(key) && column < columns);
      }
    }

    CUTE_DEVICE static Element const* elements(uint16_t const* x) {
      return reinterpret_cast<Element const*>(x);
    }

    CUTE_DEVICE void read_queries() {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int k = 0; k < kSteps; ++k) {
          Wmma::load(q[m][k], elements(strip.q + m * kFragM * kPitch + k * kK), kPitch);
        }
      }
    }

    CUTE_DEVICE void clear_output() {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        CUTE_UNROLL
        for (int d = 0; d < kBlocksO; ++d) Wmma::fill(o[m][d], 0.0f);
      }
    }

    // Stores S = Q K^T to the strip. K has one row per key; read column-major it is K^T.
    CUTE_DEVICE void product_qk() {
      CUTE_UNROLL
      for (int n = 0; n < kBlocksS; ++n) {
        Accumulator s[kRowBlocks];
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) Wmma::fill(s[m], 0.0f);
        CUTE_UNROLL
        for (int k = 0; k < kSteps; ++k) {
          Keys keys;
          Wmma::load(keys, elements(shared.k + n * kFragN * kPitch + k * kK), kPitch);
          CUTE_UNROLL
          for (int m = 0; m < kRowBlocks; ++m) Wmma::mma(s[m], q[m][k], keys);
        }
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          Wmma::store(strip.s + m * kFragM * kPitchS + n * kFragN, s[m], kPitchS);
        }
      }
    }

    // Turns S of tile n into P. Returns the factor of O for this lane's row.
    CUTE_DEVICE float softmax_weights(int n) {
      int const row = lane / 2;
      float x[kRowKeys];
      float largest = -kInf;
      CUTE_UNROLL
      for (int i = 0; i < kRowKeys; i += 4) {
        *reinterpret_cast<float4*>(x + i) =
            *reinterpret_cast<float4 const*>(strip.s + row * kPitchS + 2 * i + first_key);
      }
      CUTE_UNROLL
      for (int i = 0; i < kRowKeys; ++i) {
        int const key = n * kBlockN + i / 4 * 8 + first_key + i % 4;
        bool const visible = key >= lo && key < hi;
        x[i] = visible ? score(x[i], tile.seq.batch, tile.head_q, query, key) : -kInf;
        largest = fmaxf(largest, x[i]);
      }
      largest = fmaxf(largest, Arch::shuffle_xor(largest, 1));
      float const rescale = softmax.update_max(largest, log2_scale);
      CUTE_UNROLL
      for (int i = 0; i < kRowKeys; ++i) {
        x[i] = softmax.weight(x[i], log2_scale);
        softmax.sum += x[i];  // this lane's keys; the two lanes' sums are added after the loop
      }
      Arch::sync_warp();  // all lanes have read their part of S
      CUTE_UNROLL
      for (int i = 0; i < kRowKeys; i += 4) {
        *reinterpret_cast<uint2*>(strip.weights.p + row * kPitchP + 2 * i + first_key) =
            uint2{Arch::template pack<Element>(x[i], x[i + 1]),
                  Arch::template pack<Element>(x[i + 2], x[i + 3])};
      }
      return rescale;
    }

    // Multiplies this lane's row of O by `factor`. Also makes P visible to the warp.
    CUTE_DEVICE void scale_output(float factor) {
      constexpr int kShare = kFragN / 2;
      float* const mine = strip.weights.factor + lane / 2 * kPitchFactor + lane % 2 * kShare;
      CUTE_UNROLL
      for (int i = 0; i < kShare; i += 4) {
        *reinterpret_cast<float4*>(mine + i) = float4{factor, factor, factor, factor};
      }
      Arch::sync_warp();  // factors full
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        Accumulator factors;
        Wmma::load(factors, strip.weights.factor + m * kFragM * kPitchFactor, kPitchFactor);
        CUTE_UNROLL
        for (int d = 0; d < kBlocksO; ++d) {
          CUTE_UNROLL
          for (int i = 0; i < factors.num_elements; ++i) o[m][d].x[i] *= factors.x[i];
        }
      }
    }

    // O += P V
    CUTE_DEVICE void product_pv() {
      Arch::sync_warp();  // P full
      CUTE_UNROLL
      for (int k = 0; k < kBlockN; k += kK) {
        Weights weights[kRowBlocks];
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          Wmma::load(weights[m], elements(strip.weights.p + m * kFragM * kPitchP + k), kPitchP);
        }
        CUTE_UNROLL
        for (int d = 0; d < kBlocksO; ++d) {
          Values values;
          Wmma::load(values, elements(shared.v + k * kPitch + d * kFragN), kPitch);
          CUTE_UNROLL
          for (int m = 0; m < kRowBlocks; ++m) Wmma::mma(o[m][d], weights[m], values);
        }
      }
    }

    // The epilogue: adds sinks, writes LSE, normalises O and stores it.
    CUTE_DEVICE void finish() {
      int const row = row0 + lane / 2;
      softmax.sum += Arch::shuffle_xor(softmax.sum, 1);
      float const factor = finish_row(p, tile.seq, tile.head_q, query, softmax, log2_scale,
                                      lane % 2 == 0 && row < tile.rows);
      Arch::sync_warp();  // the strip empty
      scale_output(factor);
      CUTE_UNROLL
      for (int d = 0; d < kHeadDim; d += kColumnsO) {
        Arch::sync_warp();  // the factors, or the previous columns, empty
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          CUTE_UNROLL
          for (int c = 0; c < kColumnsO; c += kFragN) {
            Wmma::store(strip.s + m * kFragM * kPitchS + c, o[m][(d + c) / kFragN], kPitchS);
          }
        }
        Arch::sync_warp();  // these columns full
        store_columns(d);
      }
    }

    // Stores columns [d, d + kColumnsO) of O from the strip.
    CUTE_DEVICE void store_columns(int d) {
      constexpr int kVectors = kColumnsO / 8;
      Element* const base = tile.seq.template queries<Element>(p.o, tile.head_q);
      CUTE_UNROLL
      for (int i = lane; i < kRows * kVectors; i += 32) {
        int const row = i / kVectors, column = i % kVectors * 8;
        if (row0 + row >= tile.rows || d + column >= p.head_dim_v) continue;
        float const* const from = strip.s + row * kPitchS + column;
        Element* const to = base + int64_t(tile.q_begin + row0 + row) * p.o.row_stride + d + column;
        *reinterpret_cast<uint4*>(to) = uint4{Arch::template pack<Element>(from[0], from[1]),
                                              Arch::template pack<Element>(from[2], from[3]),
                                              Arch::template pack<Element>(from[4], from[5]),
                                              Arch::template pack<Element>(from[6], from[7])};
      }
    }
  };
};

}  // namespace cutlass_attn::wmma
