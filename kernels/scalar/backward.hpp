// The backward pass on CUDA cores: the reference for faster kernels, and the fallback if none of
// them can run. All sums are in fp32 in a fixed order, so results are deterministic.
//
// Three launches of blocks of 256 threads. Each recomputes P from the LSE:
//
//   before   32 queries of a head: delta, stored in the workspace, and dQ
//   kernel   32 keys of a KV head, with all query heads that share it: dK and dV
//   after    one head: the gradient of its sink; or entries of the bias gradient, each by 1 to 32
//            lanes
//
// The first two launches are symmetric. A block owns 32 rows and loops over tiles of 32 columns.
// Warp w owns rows 4w .. 4w+3, lane l owns column l. Head dimensions go through shared memory in
// chunks of 64, with rows 65 floats apart. Products of rows and columns give weights in shared
// memory. The rows of the other operand are summed with these weights; in that step lane l owns
// columns l and l + 32 of each chunk.
#pragma once

#include <cute/config.hpp>

#include "core/dropout.hpp"
#include "core/general_score.hpp"
#include "core/mask.hpp"
#include "core/math.hpp"
#include "core/sequences.hpp"
#include "scalar/backward_params.hpp"

namespace cutlass_attn::scalar {

// Head dimensions up to kHeadDim, a multiple of 64.
template <class Element, int kHeadDim>
struct Backward : KernelDefaults {
  using Params = BackwardParams;
  static constexpr int kTile = 32;
  static constexpr int kBlockM = kTile;
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocksPerSm = 1;
  static constexpr int kOwn = kTile / (kThreads / 32);  // rows per warp
  static constexpr int kChunk = 64;
  static constexpr int kChunks = kHeadDim / kChunk;
  static constexpr int kCols = kChunk / 32;  // columns of a chunk per lane
  static_assert(kHeadDim % kChunk == 0);

  struct SharedStorage {
    float rows[kTile][kChunk + 1];            // a chunk of the rows that the block owns
    float columns[kTile][kChunk + 1];         // a chunk of the rows that it loops over
    float p[kTile][kTile], ds[kTile][kTile];  // weights by row and column
    float sums[kThreads / 32];
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);

  // A tile of rows of an operand, starting at `begin`. Rows from `end` on are zeros.
  struct Rows {
    Element const* first;
    int64_t stride;
    int begin, end, columns;
  };

  // A warp's sums for its rows: column lane + 32 j of chunk c in [c * kCols + j].
  using Sums = float[kOwn][kChunks * kCols];

  template <class Arch>
  CUTE_DEVICE static int own(int i) {
    return Arch::thread() / 32 * kOwn + i;
  }

  template <class Arch>
  CUTE_DEVICE static void load_chunk(float (&to)[kTile][kChunk + 1], Rows const& from, int d0) {
    int const d = Arch::thread() % kChunk;
    CUTE_UNROLL
    for (int r = Arch::thread() / kChunk; r < kTile; r += kThreads / kChunk) {
      bool const inside = from.begin + r < from.end && d0 + d < from.columns;
      to[r][d] = inside ? float(from.first[(from.begin + r) * from.stride + d0 + d]) : 0.0f;
    }
  }

  // s[i]: product of row i of this warp and this lane's column.
  template <class Arch>
  CUTE_DEVICE static void multiply(SharedStorage& shared, Rows const& rows, Rows const& columns,
                                   float (&s)[kOwn]) {
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) s[i] = 0.0f;
    for (int d0 = 0; d0 < rows.columns; d0 += kChunk) {
      Arch::sync();  // previous chunk empty
      load_chunk<Arch>(shared.rows, rows, d0);
      load_chunk<Arch>(shared.columns, columns, d0);
      Arch::sync();
#pragma unroll 4
      for (int d = 0; d < kChunk; ++d) {
        float const column = shared.columns[Arch::thread() % 32][d];
        CUTE_UNROLL
        for (int i = 0; i < kOwn; ++i) s[i] = fmaf(shared.rows[own<Arch>(i)][d], column, s[i]);
      }
    }
  }

  // Adds the rows of `columns`, times this warp's weights for them, to the warp's sums.
  template <class Arch>
  CUTE_DEVICE static void add_up(SharedStorage& shared, float const (&weights)[kTile][kTile],
                                 Rows const& columns, Sums& sums) {
    CUTE_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      if (c * kChunk >= columns.columns) break;
      Arch::sync();  // weights full, previous chunk empty
      load_chunk<Arch>(shared.columns, columns, c * kChunk);
      Arch::sync();
#pragma unroll 4
      for (int column = 0; column < kTile; ++column) {
        CUTE_UNROLL
        for (int i = 0; i < kOwn; ++i) {
          CUTE_UNROLL
          for (int j = 0; j < kCols; ++j) {
            float& sum = sums[i][c * kCols + j];
            sum = fmaf(weights[own<Arch>(i)][column],
                       shared.columns[column][Arch::thread() % 32 + 32 * j], sum);
          }
        }
      }
    }
  }

  template <class Arch>
  CUTE_DEVICE static void store(Sums const& sums, Element* first, Rows const& rows) {
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      int const row = rows.begin + own<Arch>(i);
      if (row >= rows.end) continue;
      CUTE_UNROLL
      for (int c = 0; c < kChunks * kCols; ++c) {
        int const d = c / kCols * kChunk + Arch::thread() % 32 + 32 * (c % kCols);
        if (d < rows.columns) first[row * rows.stride + d] = Element(sums[i][c]);
      }
    }
  }

  // Recomputes a logit and its gradient from the products q k and dO v, given the query's LSE and
  // delta.
  struct Logits {
    Problem const& p;
    VarlenSeqInfo seq;
    GeneralScore score;
    DropoutMask dropout;

    CUTE_DEVICE Logits(Problem const& p, VarlenSeqInfo const& seq)
        : p(p), seq(seq), score(p, seq.lens(p)), dropout(p) {}

    // weight: output, after dropout. Returns the gradient of the logit.
    CUTE_DEVICE float grad(float s, float dp, int head, int q, int key, float lse, float delta,
                           float& weight) const {
      weight = 0.0f;
      if (lse == -kInf) return 0.0f;  // a row with no visible key and no sink
      float const exact = fast_exp2((score(s, seq.batch, head, q, key) - lse) * kLog2e);
      float const factor = dropout.is_active() ? dropout.factor(seq.batch, head, q, key) : 1.0f;
      weight = exact * factor;
      return exact * (dp * factor - delta);
    }
    // d logit / d product.
    CUTE_DEVICE float slope(float s, int head, int q, int key) const {
      return score.grad(s, seq.batch, head, q, key);
    }
  };

  CUTE_DEVICE static Rows queries(Operand const& t, VarlenSeqInfo const& seq, int head, int begin,
                                  int end, int columns) {
    return {seq.template queries<Element const>(t, head), t.row_stride, begin, end, columns};
  }
  CUTE_DEVICE static Rows keys(Operand const& t, VarlenSeqInfo const& seq, int head, int begin,
                               int end, int columns) {
    return {seq.template keys<Element const>(t, head), t.row_stride, begin, end, columns};
  }

  struct Before {
    static constexpr int kThreads = Backward::kThreads;
    static constexpr int kSmemBytes = Backward::kSmemBytes;

    template <class Arch>
    CUTE_DEVICE static void run(Params const& params, char* smem) {
      Problem const& p = params.problem;
      auto& shared = *reinterpret_cast<SharedStorage*>(smem);
      int const lane = Arch::thread() % 32;
      int const group = params.by_tiles_q(Arch::block());
      int const begin = (Arch::block() - group * params.tiles_q) * kTile;
      int const batch = params.by_heads_q(group), head = group - batch * p.num_heads_q;
      int const head_kv = params.by_heads_per_kv(head);
      VarlenSeqInfo const seq(p, batch);
      SeqLens const lens = seq.lens(p);
      if (begin >= lens.q) return;
      int const end = begin + kTile < lens.q ? begin + kTile : lens.q;

      Logits const logits(p, seq);
      IntervalMask const mask = params.mask(lens);
      Rows const q = queries(p.q, seq, head, begin, end, p.head_dim);
      Rows const grad_o = queries(params.grad.o, seq, head, begin, end, p.head_dim_v);
      Rows const o = queries(p.o, seq, head, begin, end, p.head_dim_v);
      float lse[kOwn], delta[kOwn];
      CUTE_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        int const row = begin + own<Arch>(i);
        float sum = 0.0f;
        for (int d = lane; row < end && d < p.head_dim_v; d += 32) {
          sum = fmaf(float(o.first[row * o.stride + d]),
                     float(grad_o.first[row * grad_o.stride + d]), sum);
        }
        CUTE_UNROLL
        for (int step = 16; step > 0; step /= 2) sum += Arch::shuffle_xor(sum, step);
        int64_t const at = seq.lse(p, head, row < end ? row : begin);
        if (params.grad.softmax_lse) sum -= params.grad.softmax_lse[at];
        lse[i] = row < end ? p.softmax_lse[at] : -kInf;
        delta[i] = sum;
        if (row < end && lane == 0) params.delta[at] = sum;
      }
      if (params.grad.q.data == nullptr) return;

      Sums sums = {};
      TileRange const range = mask.tiles(begin, end, kTile);
      for (int n = range.begin; n < range.end; ++n) {
        Rows const k = keys(p.k, seq, head_kv, n * kTile, lens.k, p.head_dim);
        Rows const v = keys(p.v, seq, head_kv, n * kTile, lens.k, p.head_dim_v);
        float s[kOwn], dp[kOwn];
        multiply<Arch>(shared, q, k, s);
        multiply<Arch>(shared, grad_o, v, dp);
        int const key = n * kTile + lane;
        CUTE_UNROLL
        for (int i = 0; i < kOwn; ++i) {
          int const row = begin + own<Arch>(i);
          float ds = 0.0f, weight;
          if (row < end && mask.visible(row, key)) {
            ds = logits.grad(s[i], dp[i], head, row, key, lse[i], delta[i], weight) *
                 logits.slope(s[i], head, row, key);
          }
          shared.ds[own<Arch>(i)][lane] = ds;
        }
        add_up<Arch>(shared, shared.ds, k, sums);
      }
      Operand const& to = params.grad.q;
      store<Arch>(sums, seq.template queries<Element>(to, head),
                  queries(to, seq, head, begin, end, p.head_dim));
    }
  };

  template <class Score, class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    auto& shared = *reinterpret_cast<SharedStorage*>(smem);
    int const lane = Arch::thread() % 32;
    int const group = params.by_tiles_k(Arch::block());
    int const begin = (Arch::block() - group * params.tiles_k) * kTile;
    int const batch = params.by_heads_kv(group), head_kv = group - batch * p.num_heads_kv;
    VarlenSeqInfo const seq(p, batch);
    SeqLens const lens = seq.lens(p);
    if (begin >= lens.k) return;
    int const end = begin + kTile < lens.k ? begin + kTile : lens.k;

    Logits const logits(p, seq);
    IntervalMask const mask = params.mask(lens);
    Rows const k = keys(p.k, seq, head_kv, begin, end, p.head_dim);
    Rows const v = keys(p.v, seq, head_kv, begin, end, p.head_dim_v);
    Sums sums_k = {}, sums_v = {};
    TileRange const range = mask.query_tiles(begin, end, kTile);
    int const heads = p.num_heads_q / p.num_heads_kv;
    for (int head = head_kv * heads; head < (head_kv + 1) * heads; ++head) {
      for (int m = range.begin; m < range.end; ++m) {
        Rows const q = queries(p.q, seq, head, m * kTile, lens.q, p.head_dim);
        Rows const grad_o = queries(params.grad.o, seq, head, m * kTile, lens.q, p.head_dim_v);
        float s[kOwn], dp[kOwn];
        multiply<Arch>(shared, k, q, s);
        multiply<Arch>(shared, v, grad_o, dp);
        int const query = m * kTile + lane;
        bool const inside = query < lens.q;
        int64_t const at = seq.lse(p, head, inside ? query : 0);
        int const lo = inside ? mask.lo(query) : 0, hi = inside ? mask.hi(query) : 0;
        CUTE_UNROLL
        for (int i = 0; i < kOwn; ++i) {
          int const key = begin + own<Arch>(i);
          float ds = 0.0f, weight = 0.0f;
          if (key >= lo && key < hi) {
            ds = logits.grad(s[i], dp[i], head, query, key, p.softmax_lse[at], params.delta[at],
                             weight) *
                 logits.slope(s[i], head, query, key);
          }
          shared.p[own<Arch>(i)][lane] = weight;
          shared.ds[own<Arch>(i)][lane] = ds;
        }
        add_up<Arch>(shared, shared.p, grad_o, sums_v);
        add_up<Arch>(shared, shared.ds, q, sums_k);
      }
    }
    Operand const &to_k = params.grad.k, &to_v = params.grad.v;
    if (to_k.data) {
      store<Arch>(sums_k, seq.template keys<Element>(to_k, head_kv),
                  keys(to_k, seq, head_kv, begin, end, p.head_dim));
    }
    if (to_v.data) {
      store<Arch>(sums_v, seq.template keys<Element>(to_v, head_kv),
                  keys(to_v, seq, head_kv, begin, end, p.head_dim_v));
    }
  }

  struct After {
    static constexpr int kThreads = Backward::kThreads;
    static constexpr int kSmemBytes = Backward::kSmemBytes;

    template <class Arch>
    CUTE_DEVICE static void run(Params const& params, char* smem) {
      int const block = Arch::block() - params.sinks();
      if (block < 0) {
        add_sinks<Arch>(params, *reinterpret_cast<SharedStorage*>(smem), Arch::block());
      } else {
        add_biases<Arch>(params, block);
      }
    }

    template <class Arch>
    CUTE_DEVICE static void add_sinks(Params const& params, SharedStorage& shared, int head) {
      Problem const& p = params.problem;
      float const sink = p.logits.sinks[head];
      float sum = 0.0f;
      for (int batch = 0; batch < p.batch; ++batch) {
        VarlenSeqInfo const seq(p, batch);
        SeqLens const lens = seq.lens(p);
        for (int q = Arch::thread(); q < lens.q; q += kThreads) {
          int64_t const at = seq.lse(p, head, q);
          float const lse = p.softmax_lse[at];
          if (lse != -kInf) sum -= fast_exp2((sink - lse) * kLog2e) * params.delta[at];
        }
      }
      CUTE_UNROLL
      for (int step = 16; step > 0; step /= 2) sum += Arch::shuffle_xor(sum, step);
      if (Arch::thread() % 32 == 0) shared.sums[Arch::thread() / 32] = sum;
      Arch::sync();
      if (Arch::thread() != 0) return;
      for (int warp = 1; warp < kThreads / 32; ++warp) sum += shared.sums[warp];
      params.grad.sinks[head] = sum;
    }

    template <class Arch>
    CUTE_DEVICE static void add_biases(Params const& params, int block) {
      PerLogit const& bias = params.grad.bias;
      int32_t const(&count)[4] = params.entries.count;
      int32_t const(&each)[4] = params.entries.each;
      int64_t entry = int64_t(block) * (kThreads / params.lanes) + params.by_lanes(Arch::thread());
      int const lane = Arch::thread() & (params.lanes - 1);
      int at[4];  // batch, head, query, key
      bool is_there = true;
      CUTE_UNROLL
      for (int d = 3; d >= 0; --d) {
        at[d] = int(entry % count[d]);
        entry /= count[d];
      }
      is_there = entry == 0;
      float sum = 0.0f;
      int64_t const logits = int64_t(each[0]) * each[1] * each[2] * each[3];
      for (int64_t i = lane; is_there && i < logits; i += params.lanes) {
        int64_t rest = i;
        int of[4];
        CUTE_UNROLL
        for (int d = 3; d >= 0; --d) {
          of[d] = at[d] + int(rest % each[d]);
          rest /= each[d];
        }
        sum += grad_of_logit(params, of[0], of[1], of[2], of[3]);
      }
      for (int step = 1; step < params.lanes; step *= 2) sum += Arch::shuffle_xor(sum, step);
      if (!is_there || lane != 0) return;
      float* const to = static_cast<float*>(const_cast<void*>(bias.data));
      to[at[0] * bias.batch_stride + at[1] * bias.head_stride + at[2] * bias.row_stride +
         at[3] * bias.key_stride] = sum;
    }

    CUTE_DEVICE static float grad_of_logit(Params const& params, int batch, int head, int q,
                                           int key) {
      Problem const& p = params.problem;
      VarlenSeqInfo const seq(p, batch);
      SeqLens const lens = seq.lens(p);
      if (q >= lens.q || !params.mask(lens).visible(q, key)) return 0.0f;
      int const head_kv = params.by_heads_per_kv(head);
      Rows const q_rows = queries(p.q, seq, head, q, lens.q, p.head_dim);
      Rows const k_rows = keys(p.k, seq, head_kv, key, lens.k, p.head_dim);
      Rows const o_rows = queries(params.grad.o, seq, head, q, lens.q, p.head_dim_v);
      Rows const v_rows = keys(p.v, seq, head_kv, key, lens.k, p.head_dim_v);
      int64_t const at = seq.lse(p, head, q);
      float weight;
      return Logits(p, seq).grad(product(q_rows, k_rows), product(o_rows, v_rows), head, q, key,
                                 p.softmax_lse[at], params.delta[at], weight);
    }

    CUTE_DEVICE static float product(Rows const& a, Rows const& b) {
      Element const* const x = a.first + a.begin * a.stride;
      Element const* const y = b.first + b.begin * b.stride;
      float sum = 0.0f;
      for (int d = 0; d < a.columns; ++d) sum = fmaf(float(x[d]), float(y[d]), sum);
      return sum;
    }
  };
};

}  // namespace cutlass_attn::scalar
