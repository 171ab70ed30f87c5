// The launches before and after the backward kernel, for rows of queries: one block per tile of 64
// queries of a head.
#pragma once

#include "core/dropout.hpp"
#include "core/math.hpp"
#include "tile/backward_params.hpp"
#include "tile/quad_rows.hpp"

namespace cutlass_attn {

// Computes the row statistics, and zeroes dQ.
template <class Element, class SeqInfo>
struct BackwardBefore {
  using Params = MmaBackwardParams;
  static constexpr bool kIsVarlen = !std::is_same_v<SeqInfo, DenseSeqInfo>;
  static constexpr int kThreads = Params::kPrePostThreads, kRows = Params::kTileRows;
  static constexpr int kLanes = 8;  // lanes that share a row
  static constexpr int kRowsAtOnce = kThreads / kLanes, kPasses = kRows / kRowsAtOnce;

  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    Problem const& p = params.problem;
    int const block = Arch::block(), thread = Arch::thread();
    RowTile const tile = params.queries.tile<kRows, kIsVarlen, Arch>(p.seq_q, p.batch, block);
    SeqInfo const seq(p, tile.batch);
    int const rows = seq.lens(p).q - tile.begin;  // none if <= 0

    if (params.grad_q) {
      auto* const zeros = reinterpret_cast<Vector16*>(params.grad_q_at(block, 0));
      for (int i = thread; i < kRows * params.columns / 4; i += kThreads) {
        zeros[i] = Vector16{};
      }
    }
    if (thread < Params::kTurns) params.turns[int64_t(block) * Params::kTurns + thread] = 0;
    if (block == 0 && thread == 0) *params.tickets() = 0;
    // Loads of all passes come before the first store of statistics, so that a short call waits for
    // memory once.
    float lse[kPasses], sums[kPasses];
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      int const row = row_of<Arch>(i);
      lse[i] = row < rows ? p.softmax_lse[seq.lse(p, tile.head, tile.begin + row)] : -kInf;
    }
    dots<Arch>(params, seq, tile, rows, sums);
    float sink_sum = 0.0f;
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      if (thread % kLanes == 0) {
        float stats[2] = {-kInf, 0.0f};
        row_stats(params, seq, tile, row_of<Arch>(i), lse[i] * kLog2e, sums[i], stats, sink_sum);
        auto* const to = params.stats + (int64_t(block) * kRows + row_of<Arch>(i)) * 2;
        to[0] = stats[0], to[1] = stats[1];
      }
    }
    if (params.sinks) add_up<Arch>(sink_sum, smem, params.sinks + block);
  }

 private:
  // Row of the tile in a pass.
  template <class Arch>
  CUTE_DEVICE static int row_of(int pass) {
    return pass * kRowsAtOnce + Arch::thread() / kLanes;
  }

  // Dot products of the rows of dO and of O, in all lanes of a row; 0 beyond the tile's rows.
  template <class Arch>
  CUTE_DEVICE static void dots(Params const& params, SeqInfo const& seq, RowTile const& tile,
                               int rows, float (&sums)[kPasses]) {
    Problem const& p = params.problem;
    Element const* const o = seq.template queries<Element const>(p.o, tile.head);
    Element const* const g = seq.template queries<Element const>(params.grad.o, tile.head);
    for (float& sum : sums) sum = 0.0f;
    for (int column = Arch::thread() % kLanes * 8; column < p.head_dim_v; column += kLanes * 8) {
      Vector16 x[kPasses] = {}, y[kPasses] = {};
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        int64_t const query = tile.begin + row_of<Arch>(i);
        if (row_of<Arch>(i) >= rows) continue;
        x[i] = *reinterpret_cast<Vector16 const*>(o + query * p.o.row_stride + column);
        y[i] = *reinterpret_cast<Vector16 const*>(g + query * params.grad.o.row_stride + column);
      }
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        Element const* const a = reinterpret_cast<Element const*>(&x[i]);
        Element const* const b = reinterpret_cast<Element const*>(&y[i]);
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j) sums[i] = fmaf(float(a[j]), float(b[j]), sums[i]);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      CUTE_UNROLL
      for (int lanes = 1; lanes < kLanes; lanes *= 2) {
        sums[i] += Arch::shuffle_xor(sums[i], lanes);
      }
    }
  }

  // lse: in units of log2; -inf for rows without weights, which have no gradients.
  CUTE_DEVICE static void row_stats(Params const& params, SeqInfo const& seq, RowTile const& tile,
                                    int row, float lse, float sum, float (&stats)[2],
                                    float& sink_sum) {
    if (lse == -kInf) return;
    Problem const& p = params.problem;
    int64_t const at = seq.lse(p, tile.head, tile.begin + row);
    float const delta = params.grad.softmax_lse ? sum - params.grad.softmax_lse[at] : sum;
    stats[0] = -lse;
    stats[1] = delta * kept_share(p.dropout.p);  // see backward.hpp
    if (params.sinks) sink_sum += fast_exp2(p.logits.sinks[tile.head] * kLog2e - lse) * delta;
  }

  // Sums x over the block, in a fixed order.
  template <class Arch>
  CUTE_DEVICE static void add_up(float x, char* smem, float* to) {
    CUTE_UNROLL
    for (int lanes = kLanes; lanes < 32; lanes *= 2) x += Arch::shuffle_xor(x, lanes);
    auto* const of_warp = reinterpret_cast<float*>(smem);
    int const thread = Arch::thread();
    if (thread % 32 == 0) of_warp[thread / 32] = x;
    Arch::sync();
    if (thread == 0) {
      float sum = 0.0f;
      for (int i = 0; i < kThreads / 32; ++i) sum += of_warp[i];
      *to = sum;
    }
  }
};

// BackwardBefore, which also zeroes the bias gradient.
template <class Element, class SeqInfo>
struct BackwardBeforeBias : BackwardBefore<Element, SeqInfo> {
  using Before = BackwardBefore<Element, SeqInfo>;
  using Params = MmaBackwardParams;

  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    if (Arch::block() < params.queries.all) return Before::template run<Arch>(params, smem);
    Problem const& p = params.problem;
    PerLogit const& to = params.grad.bias;
    int const heads = to.head_stride == 0 ? 1 : p.num_heads_q;
    int const queries = to.row_stride == 0 ? 1 : p.seq_q.seqlen;
    int const keys = to.key_stride == 0 ? 1 : p.seq_k.seqlen;
    int64_t const begin = (Arch::block() - params.queries.all) * Params::kBiasRows;
    CUTE_NO_UNROLL
    for (int64_t i = begin; i < begin + Params::kBiasRows && i < params.bias_rows(); ++i) {
      int64_t const group = i / queries, batch = group / heads;
      float* const row = static_cast<float*>(const_cast<void*>(to.data)) + batch * to.batch_stride +
                         (group - batch * heads) * to.head_stride +
                         (i - group * queries) * to.row_stride;
      for (int key = Arch::thread(); key < keys; key += Before::kThreads) {
        row[key * to.key_stride] = 0.0f;
      }
    }
  }
};

// Scales and rounds dQ, and computes the gradients of sinks.
template <class Element, class SeqInfo>
struct BackwardAfter {
  using Params = MmaBackwardParams;
  static constexpr bool kIsVarlen = !std::is_same_v<SeqInfo, DenseSeqInfo>;
  static constexpr int kThreads = Params::kPrePostThreads, kRows = Params::kTileRows;
  static constexpr int kWarps = kThreads / 32;

  template <class Arch>
  CUTE_DEVICE static void run(Params const& params, char* smem) {
    int const tiles = params.grad_q ? int(params.queries.all) : 0;
    if (Arch::block() < tiles) {
      convert<Arch>(params);
    } else {
      add_sinks<Arch>(params, Arch::block() - tiles, smem);
    }
  }

 private:
  // A warp converts one m16 block of the tile, 32 columns at a time.
  template <class Arch>
  CUTE_DEVICE static void convert(Params const& params) {
    Problem const& p = params.problem;
    int const block = Arch::block(), warp = Arch::thread() / 32, lane = Arch::thread() % 32;
    RowTile const tile = params.queries.tile<kRows, kIsVarlen, Arch>(p.seq_q, p.batch, block);
    SeqInfo const seq(p, tile.batch);
    int const row = warp * 16 + lane / 4;
    int const rows = seq.lens(p).q - tile.begin;
    Element* const target = seq.template queries<Element>(params.grad.q, tile.head) +
                            int64_t(tile.begin + row) * params.grad.q.row_stride;
    float const* const from = params.grad_q_at(block, warp * 16);
    float const scale = p.logits.softmax_scale * (1.0f / kept_share(p.dropout.p));
    int const end = params.columns / 8;
    float x[4][4];
    auto const load = [&](int first) {
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) x[n][i] = from[(first + n) * 128 + Arch::place_of(lane, i)];
      }
    };
    load(0);
    for (int first = 0; first < end; first += 4) {
      uint32_t words[2][4];  // two rows, 8 apart
      CUTE_UNROLL
      for (int n = 0; n < 4; ++n) {
        for (float& value : x[n]) value *= scale;
        words[0][n] = Arch::template pack<Element>(x[n][0], x[n][1]);
        words[1][n] = Arch::template pack<Element>(x[n][2], x[n][3]);
      }
      if (first + 4 < end) load(first + 4);  // ahead of the stores
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        store_columns<Arch>(target + half * 8 * params.grad.q.row_stride, words[half], first,
                            p.head_dim, row + half * 8 < rows, lane);
      }
    }
  }

  // Gradient of a query head's sink, summed in a fixed order: minus the sum of exp(sink - LSE)
  // delta over all rows.
  template <class Arch>
  CUTE_DEVICE static void add_sinks(Params const& params, int head, char* smem) {
    Problem const& p = params.problem;
    RowTiles const& tiles = params.queries;
    bool const is_packed = kIsVarlen && p.seq_q.cu_seqlens;
    int const thread = Arch::thread();
    float sum = 0.0f;
    for (int batch = 0; batch < (is_packed ? 1 : p.batch); ++batch) {
      float const* const parts = params.sinks + (int64_t(batch) * tiles.heads + head) * tiles.each;
      for (int i = thread; i < tiles.each; i += kThreads) sum += parts[i];
    }
    CUTE_UNROLL
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += Arch::shuffle_xor(sum, lanes);
    auto* const of_warp = reinterpret_cast<float*>(smem);
    if (thread % 32 == 0) of_warp[thread / 32] = sum;
    Arch::sync();
    if (thread == 0) {
      sum = 0.0f;
      for (int i = 0; i < kWarps; ++i) sum += of_warp[i];
      params.grad.sinks[head] = -sum;
    }
  }
};

}  // namespace cutlass_attn
