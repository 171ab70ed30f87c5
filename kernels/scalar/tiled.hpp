// The second rung: tiles in shared memory, row reductions by warp shuffles, few barriers.
//
// Grid:   batch * num_heads_q * ceil(seqlen_q / 32) blocks of 256 threads.
// Tile:   32 queries x 64 keys; the head dimension passes through in chunks of 64.
// Warps:  warp w owns queries 4w .. 4w+3. In Q K^T lane l owns keys l and l + 32; in P V it owns
//         columns l and l + 32 of each chunk. So softmax needs shuffles but no barrier, and P is
//         exchanged only between lanes of one warp.
// Shared: Q of the tile (room for kHeadDim columns), one chunk of K or V in fp32, P in fp32.
//         Rows of the chunk are 65 floats apart: lanes that read one column hit 32 banks.
#pragma once

#include <cute/config.hpp>

#include "arch/votes.hpp"
#include "core/dropout.hpp"
#include "core/epilogue.hpp"
#include "core/forward_params.hpp"
#include "core/mask.hpp"
#include "core/softmax.hpp"

namespace cutlass_attn::scalar {

// Head dimensions up to kHeadDim, a multiple of 64.
template <class Element, int kHeadDim>
struct Tiled : KernelDefaults {
  using Params = ForwardParams;
  static constexpr int kBlockM = 32;
  static constexpr int kBlockN = 64;
  static constexpr int kChunk = 64;
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocksPerSm = kHeadDim <= 256 ? 2 : 1;  // limited by shared memory
  static constexpr int kRows = kBlockM / (kThreads / 32);          // queries per warp
  static constexpr int kCols = kBlockN / 32;  // keys, or columns of a chunk, per lane
  static constexpr int kChunks = kHeadDim / kChunk;
  static constexpr int kPitch = kChunk + 1;
  static_assert(kHeadDim % kChunk == 0 && kCols == 2);

  struct SharedStorage {
    Element q[kBlockM][kHeadDim];
    float kv[kBlockN][kPitch];  // a chunk of K in Q K^T, a chunk of V in P V
    float p[kBlockM][kBlockN];
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);

  // Columns [d0, d0 + kChunk) of rows [row0, row0 + kBlockN); zeros beyond the operand.
  template <class Arch>
  CUTE_DEVICE static void load_chunk(SharedStorage& shared, DenseKv<Element> const& source,
                                     int row0, int rows, int d0, int columns) {
    int const d = Arch::thread() % kChunk;
    CUTE_UNROLL
    for (int r = Arch::thread() / kChunk; r < kBlockN; r += kThreads / kChunk) {
      bool const inside = row0 + r < rows && d0 + d < columns;
      shared.kv[r][d] = inside ? float(source.row(row0 + r)[d0 + d]) : 0.0f;
    }
  }

  // o += P V of one key, for a chunk of columns.
  template <class Acc>
  CUTE_DEVICE static void add_value(SharedStorage const& shared, int row0, int lane, int key, int c,
                                    Acc& acc) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kCols; ++j) {
        float& to = acc[i][c * kCols + j];
        to = fmaf(shared.p[row0 + i][key], shared.kv[key][lane + 32 * j], to);
      }
    }
  }

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    auto& shared = *reinterpret_cast<SharedStorage*>(smem);
    TileCoord const tile(p, params.scheduler, kBlockM, Arch::block());
    SeqLens const seqlens = tile.seq.lens(p);
    int const lane = Arch::thread() % 32;
    int const row0 = Arch::thread() / 32 * kRows;  // this warp's first query in the tile

    Element const* const q = tile.seq.template queries<Element>(p.q, tile.head_q);
    Element* const o = tile.seq.template queries<Element>(p.o, tile.head_q);
    DenseKv<Element> const k(p, tile.seq, p.k, tile.head_kv), v(p, tile.seq, p.v, tile.head_kv);

    Score const score(p, seqlens);
    float const log2_scale = score.log2_scale();
    IntervalMask const mask = params.template mask<Score::kHasChunks>(seqlens);
    DropoutMask const dropout(p);

    for (int i = Arch::thread(); i < kBlockM * p.head_dim; i += kThreads) {
      int const r = i / p.head_dim, d = i % p.head_dim;
      bool const inside = tile.q_begin + r < seqlens.q;
      shared.q[r][d] = inside ? q[int64_t(tile.q_begin + r) * p.q.row_stride + d] : Element(0.0f);
    }

    SoftmaxRow softmax[kRows];
    int lo[kRows], hi[kRows];
    float acc[kRows][kChunks * kCols] = {};
    for (int i = 0; i < kRows; ++i) {
      lo[i] = mask.lo(tile.q_begin + row0 + i);
      hi[i] = mask.hi(tile.q_begin + row0 + i);
    }

    TileRange const range = mask.tiles(tile.q_begin, tile.q_end, kBlockN);
    for (int n = range.begin; n < range.end; ++n) {
      int const key0 = n * kBlockN;

      float s[kRows][kCols] = {};
      for (int d0 = 0; d0 < p.head_dim; d0 += kChunk) {
        Arch::sync();  // chunk empty
        load_chunk<Arch>(shared, k, key0, seqlens.k, d0, p.head_dim);
        Arch::sync();
        int const width = p.head_dim - d0 < kChunk ? p.head_dim - d0 : kChunk;
#pragma unroll 4
        for (int d = 0; d < width; ++d) {
          CUTE_UNROLL
          for (int i = 0; i < kRows; ++i) {
            float const query = float(shared.q[row0 + i][d0 + d]);
            CUTE_UNROLL
            for (int j = 0; j < kCols; ++j) {
              s[i][j] = fmaf(query, shared.kv[lane + 32 * j][d], s[i][j]);
            }
          }
        }
      }

      bool is_seen[kCols] = {};  // per key of this lane: whether a query of the warp sees it
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        bool const is_there = tile.q_begin + row0 + i < seqlens.q;
        float largest = -kInf;
        CUTE_UNROLL
        for (int j = 0; j < kCols; ++j) {
          int const key = key0 + lane + 32 * j;
          bool const visible = key >= lo[i] && key < hi[i];
          s[i][j] = visible
                        ? score(s[i][j], tile.seq.batch, tile.head_q, tile.q_begin + row0 + i, key)
                        : -kInf;
          is_seen[j] = is_seen[j] || (is_there && s[i][j] != -kInf);
          largest = fmaxf(largest, s[i][j]);
        }
        for (int step = 16; step > 0; step /= 2) {
          largest = fmaxf(largest, Arch::shuffle_xor(largest, step));
        }
        float const rescale = softmax[i].update_max(largest, log2_scale);
        CUTE_UNROLL
        for (int j = 0; j < kCols; ++j) {
          float weight = softmax[i].weight(s[i][j], log2_scale);
          softmax[i].sum += weight;  // sum of this lane's keys; reduced over lanes after the loop
          if (dropout.is_active()) {
            weight *= dropout.factor(tile.seq.batch, tile.head_q, tile.q_begin + row0 + i,
                                     key0 + lane + 32 * j);
          }
          shared.p[row0 + i][lane + 32 * j] = weight;
        }
        CUTE_UNROLL
        for (int c = 0; c < kChunks * kCols; ++c) acc[i][c] *= rescale;
      }

      // Weights of unseen keys are 0, but 0 times NaN is NaN.
      uint32_t unseen[kCols];
      CUTE_UNROLL
      for (int j = 0; j < kCols; ++j) unseen[j] = arch::Votes::ballot(!is_seen[j]);

      CUTE_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        int const d0 = c * kChunk;
        if (d0 >= p.head_dim_v) break;
        Arch::sync();  // K, or the previous chunk, empty; P full
        load_chunk<Arch>(shared, v, key0, seqlens.k, d0, p.head_dim_v);
        Arch::sync();
        if ((unseen[0] | unseen[1]) == 0) {
#pragma unroll 4
          for (int key = 0; key < kBlockN; ++key) add_value(shared, row0, lane, key, c, acc);
        } else {
          for (int key = 0; key < kBlockN; ++key) {
            if (!(unseen[key / 32] >> key % 32 & 1)) add_value(shared, row0, lane, key, c, acc);
          }
        }
      }
    }

    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      for (int step = 16; step > 0; step /= 2) {
        softmax[i].sum += Arch::shuffle_xor(softmax[i].sum, step);
      }
      int const q_index = tile.q_begin + row0 + i;
      if (q_index >= seqlens.q) continue;
      float const factor =
          finish_row(p, tile.seq, tile.head_q, q_index, softmax[i], log2_scale, lane == 0);
      CUTE_UNROLL
      for (int c = 0; c < kChunks * kCols; ++c) {
        int const d = c / kCols * kChunk + lane + 32 * (c % kCols);
        if (d < p.head_dim_v) {
          o[int64_t(q_index) * p.o.row_stride + d] = Element(acc[i][c] * factor);
        }
      }
    }
  }
};

}  // namespace cutlass_attn::scalar
