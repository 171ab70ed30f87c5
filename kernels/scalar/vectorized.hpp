// The third rung: register tiles, 16-byte accesses, and a copy that runs ahead of the arithmetic.
//
// Grid:     batch * num_heads_q * ceil(seqlen_q / 64) blocks of 256 threads, or of 128 for head
//           dimensions beyond 64.
// Tile:     64 queries x 64 keys. K and V go through one buffer in chunks of 64 columns: first K's
//           chunks, then V's.
// Groups:   if kHeadDim is 64, two groups of warps take the key tiles in turn. Each group has
//           buffers, a softmax state and an O of its own; they merge at the end. This gives each
//           scheduler of an SM two warps. For more head dimensions Ada has too little shared
//           memory.
// Thread:   kRows queries, 4 apart, by 8 keys, 8 apart; of O, kRows queries by 8 columns of each
//           chunk. The 8 threads that share queries are in one warp: softmax needs three shuffles,
//           and P never leaves the warp.
// Pipeline: 16-byte loads bring the next chunk into registers while the present one is computed.
//           The chunk is converted to fp32 once, when it is stored to shared memory.
//
// Shared memory is all fp32. A row of a chunk is 64 + 4 floats long. Thread c of the 8 that copy a
// row stores 8 columns as two quads, 32 floats apart:
//
//   float     0    4    8   ...  28   32   36  ...  60   64
//   thread    0    1    2   ...   7    0    1  ...   7   (padding)
//
// In fp16 the two quads are one 16-byte vector in global memory, so columns are permuted in shared
// memory. Q K^T is unaffected, because Q has the same permutation. In P V a thread gets 8
// neighbouring columns of O, which it stores as one vector. No access has a bank conflict: 8
// threads, a phase of a 128-bit access, store 128 bytes of one row. They read one quad of Q or P,
// or the quads of 8 neighbouring rows of K, which are 68 floats and so 4 banks apart, or 128 bytes
// of one row of V. Rows of P are 72 floats apart: the 4 x 8 weights that a warp stores at a time
// are in 32 banks.
//
// Speed limit: the reference shape (B=2 H=8 S=512 D=64, fp16) takes 2 B H S^2 D = 537 M FFMA. Its
// 128 blocks run on 128 of an H200's 132 SMs. Each executes 4.2 M FFMA, 128 per clock: 32,768
// clocks, 16.6 us at 1.98 GHz. A thread reads 12 quads for 128 FFMA; an LDS.128 that merges two
// quarters of a warp takes 96 of the 128 clocks for that. The kernel is bound by latency, with two
// warps per scheduler; docs/notes/ladder.md lists what was tried. scalar/tiled executes six loads
// for eight FFMA.
#pragma once

#include <cutlass/numeric_types.h>
#include <cstdint>
#include <cute/config.hpp>
#include <type_traits>

#include "core/dropout.hpp"
#include "core/epilogue.hpp"
#include "core/forward_params.hpp"
#include "core/mask.hpp"
#include "core/math.hpp"
#include "core/opaque.hpp"
#include "core/softmax.hpp"
#include "core/vector.hpp"

namespace cutlass_attn::scalar {

// Head dimensions up to kHeadDim, a multiple of 64. Rows of the operands are aligned to 16 bytes,
// and their lengths are multiples of 16 bytes.
template <class Element, int kHeadDim>
struct Vectorized : KernelDefaults {
  using Params = ForwardParams;
  static constexpr int kBlockM = 64;
  static constexpr int kBlockN = 64;
  static constexpr int kChunk = 64;
  static constexpr int kChunks = kHeadDim / kChunk;
  static constexpr int kCols = 8;  // keys, or columns of a chunk, per thread
  // Queries per thread. 8 would read less shared memory per FFMA, but halve the number of warps.
  static constexpr int kRows = 4;
  static constexpr int kGroups = kChunks == 1 ? 2 : 1;
  static constexpr int kGroupThreads = kBlockM / kRows * 8;
  static constexpr int kThreads = kGroups * kGroupThreads;
  static constexpr int kMinBlocksPerSm = 1;
  static_assert(kHeadDim % kChunk == 0);

  struct alignas(16) Words {
    uint32_t x[4];
  };

  // This thread's position in its group, and its part of a tile: queries row(i) and keys lane + 8
  // j. Lanes of a warp that differ only in bit 0 share keys; lanes that differ only in bit 1 share
  // queries. Both let LDS.128 merge two quarters of a warp into one phase.
  struct Place {
    int group, thread, lane, row0;

    CUTE_DEVICE explicit Place(int number) {
      // Without opaque, the compiler keeps all values derived from `number` through the loop.
      number = opaque(number);
      group = number / kGroupThreads;
      thread = number % kGroupThreads;
      lane = thread / 2 % 8;
      row0 = thread / 32 * (4 * kRows) + thread % 32 / 16 * 2 + thread % 2;
    }
    CUTE_DEVICE int row(int i) const { return row0 + 4 * i; }
  };

  struct alignas(16) Chunk {
    float at[64][kChunk + 4];

    CUTE_DEVICE Quad& quad(int row, int column) { return reinterpret_cast<Quad&>(at[row][column]); }
  };
  struct alignas(16) Weights {
    float at[kBlockM][kBlockN + 8];

    CUTE_DEVICE Quad& quad(int row, int key) { return reinterpret_cast<Quad&>(at[row][key]); }
    // Behind the weights of a row: for each of its 8 threads, the sum of that thread's weights.
    CUTE_DEVICE float& sum(Place const& place, int i) {
      return at[place.row(i)][kBlockN + place.lane];
    }
  };

  // Shared memory of one group.
  struct GroupStorage {
    union {
      Chunk kv;                                         // present chunk
      float o[kChunks * kRows * kCols][kGroupThreads];  // at the end: this group's O
    };
    Weights p;
    SoftmaxRow rows[kBlockM];  // at the end
  };
  struct SharedStorage {
    Chunk q[kChunks];
    GroupStorage groups[kGroups];
    // In shared memory, because no registers are left.
    TileCoord tile;
    TileRange range;
    TileMask mask;
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);

  // A thread's part of a chunk on its way from global to shared memory, if kCopiers threads copy
  // it: 8 columns of every kStep-th row. Kept as words, because fp16 elements would take a register
  // each.
  template <int kCopiers>
  struct Copy {
    static constexpr int kStep = kCopiers / 8;
    static constexpr int kPasses = 64 / kStep;
    static constexpr int kVectors = sizeof(Element) / 2;  // for 8 columns
    Words words[kPasses][kVectors];

    // Loads from `base` on; zeros beyond `rows` and `columns`.
    CUTE_DEVICE void fetch(Element const* base, int64_t row_stride, int rows, int columns,
                           int thread) {
      int row = thread / 8;
      Element const* from = base + row * row_stride;
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        CUTE_UNROLL
        for (int n = 0; n < kVectors; ++n) {
          int const column = column_of(thread % 8, n);
          words[i][n] = Words{};
          if (row < rows && column < columns) {
            words[i][n] = *reinterpret_cast<Words const*>(from + column);
          }
        }
        row += kStep;
        from += kStep * row_stride;
      }
    }

    CUTE_DEVICE void put_down(Chunk& chunk, int thread) const {
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          chunk.quad(thread / 8 + i * kStep, half * 32 + thread % 8 * 4) = quad_of(words[i], half);
        }
      }
    }
  };

  // Half of 8 columns, in fp32.
  CUTE_DEVICE static Quad quad_of(Words const* words, int half) {
    Quad quad;
    CUTE_UNROLL
    for (int e = 0; e < 4; ++e) {
      uint32_t const word = sizeof(Element) == 2 ? words[0].x[half * 2 + e / 2] : words[half].x[e];
      if constexpr (std::is_same_v<Element, cutlass::half_t>) {
        quad.values[e] = half_to_float(uint16_t(word >> e % 2 * 16));
      } else if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
        quad.values[e] = bfloat16_to_float(uint16_t(word >> e % 2 * 16));
      } else {
        static_assert(std::is_same_v<Element, float>);
        __builtin_memcpy(&quad.values[e], &word, sizeof word);
      }
    }
    return quad;
  }

  // Column of a chunk at which vector n of thread `lane` (of 8) begins.
  CUTE_DEVICE static constexpr int column_of(int lane, int n) {
    return sizeof(Element) == 2 ? lane * 8 : n * 32 + lane * 4;
  }

  using Scores = float[kRows][kCols];

  // s += Q K^T over a chunk of columns.
  CUTE_DEVICE static void multiply_qk(Chunk& q, Chunk& k, Place const& at, Scores& s) {
#pragma unroll 4
    for (int d = 0; d < kChunk; d += 4) {
      Quad query[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) query[i] = q.quad(at.row(i), d);
      CUTE_UNROLL
      for (int j = 0; j < kCols; ++j) {
        Quad const key = k.quad(at.lane + 8 * j, d);
        CUTE_UNROLL
        for (int e = 0; e < 4; ++e) {
          CUTE_UNROLL
          for (int i = 0; i < kRows; ++i)
            s[i][j] = fmaf(query[i].values[e], key.values[e], s[i][j]);
        }
      }
    }
  }

  // o += P V for a chunk of V's columns. kLeavesOut: skips keys that are not in `seen`, one bit per
  // key.
  template <bool kLeavesOut>
  CUTE_DEVICE static void multiply_pv(GroupStorage& own, Place const& at, uint64_t seen,
                                      Scores& o) {
#pragma unroll 4
    for (int key = 0; key < kBlockN; key += 4) {
      Quad weight[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) weight[i] = own.p.quad(at.row(i), key);
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) {
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          Quad value = own.kv.quad(key + e, half * 32 + at.lane * 4);
          if (kLeavesOut && !(seen >> (key + e) & 1)) value = Quad{};
          CUTE_UNROLL
          for (int i = 0; i < kRows; ++i) {
            CUTE_UNROLL
            for (int c = 0; c < 4; ++c) {
              float& to = o[i][half * 4 + c];
              to = fmaf(weight[i].values[e], value.values[c], to);
            }
          }
        }
      }
    }
  }

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    auto& shared = *reinterpret_cast<SharedStorage*>(smem);
    load_queries<Score, Arch>(params, TileCoord(p, params.scheduler, kBlockM, Arch::block()),
                              shared);
    Arch::sync();  // Q full

    int const end = shared.range.end;
    Copy<kGroupThreads> copy;  // the next chunk
    auto const fetch = [&](Operand const& from, int columns, int n, int c) {
      Place const at(Arch::thread());
      int const key0 = n * kBlockN;
      DenseKv<Element> const source(p, shared.tile.seq, from, shared.tile.head_kv);
      copy.fetch(source.row(key0) + c * kChunk, source.row_stride,
                 n < end ? shared.mask.seqlen_k - key0 : 0, columns - c * kChunk, at.thread);
    };
    auto const put_down = [&] {
      Place const at(Arch::thread());
      Arch::sync(1 + at.group, kGroupThreads);  // previous chunk empty
      copy.put_down(shared.groups[at.group].kv, at.thread);
      Arch::sync(1 + at.group, kGroupThreads);
    };

    float max[kRows];  // largest score of each row
    float acc[kChunks][kRows][kCols] = {};
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Place const at(Arch::thread());
      max[i] = -kInf;
      shared.groups[at.group].p.sum(at, i) = 0.0f;
    }
    int n = shared.range.begin + Arch::thread() / kGroupThreads;
    fetch(p.k, p.head_dim, n, 0);
    for (; n < end; n += kGroups) {
      Scores s = {};
      CUTE_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        put_down();
        if (c + 1 < kChunks) fetch(p.k, p.head_dim, n, c + 1);
        if (c + 1 == kChunks) fetch(p.v, p.head_dim_v, n, 0);
        Place const at(Arch::thread());
        multiply_qk(shared.q[c], shared.groups[at.group].kv, at, s);
      }
      uint64_t const seen = softmax_weights<Score, Arch>(p, shared, n, s, max, acc);
      CUTE_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        put_down();
        if (c + 1 < kChunks) fetch(p.v, p.head_dim_v, n, c + 1);
        if (c + 1 == kChunks) fetch(p.k, p.head_dim, n + kGroups, 0);
        Place const at(Arch::thread());
        if (seen == ~uint64_t(0)) {
          multiply_pv<false>(shared.groups[at.group], at, seen, acc[c]);
        } else {
          multiply_pv<true>(shared.groups[at.group], at, seen, acc[c]);
        }
      }
    }

    Place const at(Arch::thread());
    SoftmaxRow rows[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      rows[i] = {max[i], shared.groups[at.group].p.sum(at, i)};
      CUTE_UNROLL
      for (int step = 8; step > 1; step /= 2) {
        rows[i].sum += Arch::shuffle_xor(rows[i].sum, step);
      }
    }
    float const log2_scale = Score(p, shared.tile.seq.lens(p)).log2_scale();
    if constexpr (kGroups > 1) merge_groups<Arch>(shared, at, log2_scale, rows, acc);
    if (at.group == 0) store(p, shared.tile, at, log2_scale, rows, acc);
  }

 private:
  template <class Score, class Arch>
  CUTE_DEVICE static void load_queries(Params const& params, TileCoord const& tile,
                                       SharedStorage& shared) {
    Problem const& p = params.problem;
    if (Arch::thread() == 0) {
      IntervalMask const mask = params.template mask<Score::kHasChunks>(tile.seq.lens(p));
      shared.tile = tile;
      shared.range = mask.tiles(tile.q_begin, tile.q_end, kBlockN);
      shared.mask = mask.tile_mask(tile.q_begin);
    }
    for (int c = 0; c < kChunks; ++c) {
      Copy<kThreads> copy;
      copy.fetch(tile.template row_of<Element>(p.q, 0) + c * kChunk, p.q.row_stride, tile.rows,
                 p.head_dim - c * kChunk, Arch::thread());
      copy.put_down(shared.q[c], Arch::thread());
    }
  }

  // Keys that any query of the warp sees, one bit each: weights of other keys are 0, but 0 times
  // NaN is NaN. Bit j of seen: key lane + 8 j, for this thread's queries.
  template <class Arch>
  CUTE_DEVICE static uint64_t visible_keys(uint32_t seen, int lane) {
    static_assert(kCols == 8 && kBlockN == 64);
    uint64_t keys = 0;
    CUTE_UNROLL
    for (int j = 0; j < kCols; ++j) keys |= uint64_t(seen >> j & 1) << (lane + 8 * j);
    CUTE_UNROLL
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      uint32_t const low = uint32_t(keys), high = uint32_t(keys >> 32);
      keys |= Arch::shuffle_xor(low, lanes) | uint64_t(Arch::shuffle_xor(high, lanes)) << 32;
    }
    return keys;
  }

  // Turns the scores of tile n into weights, in shared memory, and rescales O. Returns
  // visible_keys().
  template <class Score, class Arch>
  CUTE_DEVICE static uint64_t softmax_weights(Problem const& p, SharedStorage& shared, int n,
                                              Scores& s, float (&max)[kRows],
                                              float (&acc)[kChunks][kRows][kCols]) {
    Place const at(Arch::thread());
    Weights& weights = shared.groups[at.group].p;
    TileCoord const& tile = shared.tile;
    Score const score(p, tile.seq.lens(p));
    float const log2_scale = score.log2_scale();
    int const key0 = n * kBlockN + at.lane;
    bool const full = shared.range.is_full(n);
    uint32_t seen = 0;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = at.row(i);
      CUTE_UNROLL
      for (int j = 0; j < kCols; ++j) {
        s[i][j] = score(s[i][j], tile.seq.batch, tile.head_q, tile.q_begin + row, key0 + 8 * j);
      }
      if (!full) {
        int const lo = shared.mask.lo(row), hi = shared.mask.hi(row);
        CUTE_UNROLL
        for (int j = 0; j < kCols; ++j) {
          if (key0 + 8 * j < lo || key0 + 8 * j >= hi) s[i][j] = -kInf;
        }
      }
      CUTE_UNROLL
      for (int j = 0; j < kCols; ++j) {
        seen |= uint32_t(row < tile.rows && s[i][j] != -kInf) << j;
      }
      float largest = s[i][0];
      CUTE_UNROLL
      for (int j = 1; j < kCols; ++j) largest = fmaxf(largest, s[i][j]);
      CUTE_UNROLL
      for (int step = 8; step > 1; step /= 2) {
        largest = fmaxf(largest, Arch::shuffle_xor(largest, step));
      }
      SoftmaxRow state{max[i], weights.sum(at, i)};
      float const rescale = state.update_max(largest, log2_scale);
      CUTE_UNROLL
      for (int j = 0; j < kCols; ++j) {
        float const weight = state.weight(s[i][j], log2_scale);
        state.sum += weight;
        weights.at[row][at.lane + 8 * j] = weight;
      }
      max[i] = state.max;
      weights.sum(at, i) = state.sum;
      CUTE_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        CUTE_UNROLL
        for (int j = 0; j < kCols; ++j) acc[c][i][j] *= rescale;
      }
    }
    bool const may_mask_keys = !full || p.mask.elements.data;
    uint64_t const keys = may_mask_keys ? visible_keys<Arch>(seen, at.lane) : ~uint64_t(0);
    if (p.dropout.p == 0.0f) return keys;
    DropoutMask const dropout(p);
    // A loop over shared memory, so that the code of Philox appears once, not 32 times.
    for (int i = 0; i < kRows * kCols; ++i) {
      int const row = at.row(i / kCols), key = i % kCols * 8;
      weights.at[row][at.lane + key] *=
          dropout.factor(tile.seq.batch, tile.head_q, tile.q_begin + row, key0 + key);
    }
    return keys;
  }

  // Adds the results of the other groups to those of the first. Each thread reads the elements of
  // its counterparts.
  template <class Arch>
  CUTE_DEVICE static void merge_groups(SharedStorage& shared, Place const& at, float log2_scale,
                                       SoftmaxRow (&rows)[kRows],
                                       float (&acc)[kChunks][kRows][kCols]) {
    Arch::sync(1 + at.group, kGroupThreads);  // V empty
    if (at.group > 0) {
      GroupStorage& own = shared.groups[at.group];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        if (at.lane == 0) own.rows[at.row(i)] = rows[i];
        CUTE_UNROLL
        for (int c = 0; c < kChunks * kCols; ++c) {
          own.o[i * kChunks * kCols + c][at.thread] = acc[c / kCols][i][c % kCols];
        }
      }
    }
    Arch::sync();  // results of the other groups full
    if (at.group > 0) return;
    for (int g = 1; g < kGroups; ++g) {
      GroupStorage const& other = shared.groups[g];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float theirs;
        float const ours = rows[i].merge(other.rows[at.row(i)], log2_scale, theirs);
        CUTE_UNROLL
        for (int c = 0; c < kChunks * kCols; ++c) {
          float& to = acc[c / kCols][i][c % kCols];
          to = fmaf(to, ours, other.o[i * kChunks * kCols + c][at.thread] * theirs);
        }
      }
    }
  }

  CUTE_DEVICE static void store(Problem const& p, TileCoord const& tile, Place const& at,
                                float log2_scale, SoftmaxRow (&rows)[kRows],
                                float const (&acc)[kChunks][kRows][kCols]) {
    constexpr int kPerVector = 16 / sizeof(Element);
    struct alignas(16) Vector {
      Element x[kPerVector];
    };
    Element* const o = tile.template row_of<Element>(p.o, 0);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const row = at.row(i);
      if (row >= tile.rows) break;
      float const factor =
          finish_row(p, tile.seq, tile.head_q, tile.query(row), rows[i], log2_scale, at.lane == 0);
      CUTE_UNROLL
      for (int c = 0; c < kChunks; ++c) {
        CUTE_UNROLL
        for (int n = 0; n < kCols / kPerVector; ++n) {
          int const column = c * kChunk + column_of(at.lane, n);
          if (column >= p.head_dim_v) continue;
          Vector vector;
          CUTE_UNROLL
          for (int e = 0; e < kPerVector; ++e) {
            vector.x[e] = Element(acc[c][i][n * kPerVector + e] * factor);
          }
          *reinterpret_cast<Vector*>(o + row * p.o.row_stride + column) = vector;
        }
      }
    }
  }
};

}  // namespace cutlass_attn::scalar
