// The loop of the backward kernel over tiles of queries (see backward.hpp).
#pragma once

#include "core/opaque.hpp"
#include "sm80/backward_bias.hpp"
#include "tile/backward_block.hpp"
#include "tile/backward_captures.hpp"
#include "tile/backward_params.hpp"
#include "tile/backward_products.hpp"
#include "tile/backward_scores.hpp"
#include "tile/tile_copy.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct BackwardStep {
  using Element = typename Config::Element;
  using Address = typename Arch::SmemAddress;
  using Products = BackwardProducts<Config, Arch>;
  using Scores = BackwardScores<Config, Score, Arch>;
  using Slice = typename Products::Slice;
  using Packed = typename Products::Packed;
  using SavedWeights = typename Scores::SavedWeights;
  using Shared = typename Config::SharedStorage;
  using TileQ = typename Config::TileQ;
  using TileS = typename Config::TileS;
  static constexpr bool kHasRoles = Config::kHasRoles;
  static constexpr int kSlice = Config::kSlice, kBlockM = Config::kBlockM;
  static constexpr bool kGradOIsLate = Config::kGradOStages < Config::kStages;

  // A tile of queries of a query head. `head`: index among the query heads of the KV head. `left`:
  // steps from this one to the last. Steps alternate between the stages.
  struct Position {
    int head, tile, left;
    CUTE_DEVICE int stage() const { return unsigned(left) % Config::kStages; }
  };

  MmaBackwardParams const& params;
  Problem const& p;
  Shared& shared;
  typename Config::BlockInfo const& block;
  Scores const scores;
  int const warp;  // index in the block

  typename Products::Grad grad[Config::kChains];  // dV and dK, or the gradient of the role
  typename Products::Stationary stationary[Config::kChains];  // K and V, or the operand of the role

  CUTE_DEVICE BackwardStep(MmaBackwardParams const& params, SeqLens const& lens, Shared& shared)
      : params(params),
        p(params.problem),
        shared(shared),
        block(shared.block),
        scores{p, score_in_log2<Score>(p, lens), score_in_log2<Score>(p, lens).log2_scale(),
               shared.block.dropout},
        warp(Arch::uniform(Arch::thread() / 32)) {
    CUTE_UNROLL
    for (int i = 0; i < Config::kChains; ++i) clear(grad[i]);
  }

  CUTE_DEVICE int warp_n() const { return warp % Config::kWarpsN; }
  CUTE_DEVICE int role() const { return unsigned(warp) / Config::kPairs; }
  CUTE_DEVICE static int column_group(int warp) {
    return Config::kColumnGroups > 1 ? unsigned(warp) / Config::kWarpsN % Config::kColumnGroups : 0;
  }

  // Starts the copies of K and V.
  CUTE_DEVICE void load_keys() const {
    using Copy = TileCopy<Arch, Element, typename Config::TileKv, Config::kThreads>;
    int const thread = Arch::thread(), keys = block.seq.lens(p).k - block.tile.begin;
    auto const load = [&](Operand const& from, Address to, int columns) {
      Element const* const source =
          block.seq.template keys<Element const>(from, block.tile.head) +
          int64_t(block.tile.begin + Copy::row(thread)) * from.row_stride + Copy::column(thread);
      Copy::load(to + Copy::offset(thread), source, from.row_stride, keys, columns, thread);
    };
    load(p.k, Arch::smem_address(shared.k), p.head_dim);
    load(p.v, Arch::smem_address(shared.k) + Address(Config::kVDistance), p.head_dim_v);
    Arch::cp_async_commit_group();
  }

  CUTE_DEVICE void run() {
    load_stationary();
    if (block.range.begin >= block.range.end) return;
    // If dQ is added in order, tiles go from the last queries to the first. Under a causal mask the
    // last queries see the keys of most blocks, so blocks would wait for their turns at the
    // beginning.
    Position now = {0, kStep > 0 ? block.range.begin : block.range.end - 1, steps()};
    constexpr uint32_t kNone = ~0u;
    uint32_t row_before = kNone;  // row() of the previous step
    if (!kGradOIsLate || role() == 0) copy(now);
    for (; now.left > 0; now = next(now)) {
      Arch::template cp_async_wait_group<0>();
      Arch::sync();  // Q, dO and stats of this step full, of the next empty; previous dS full
      if (kGradOIsLate && role() == 1) {
        copy(now);
      } else {
        copy(next(now));
      }
      // Half of the warps add dQ before their own chain, half after it.
      bool const adds_first = !kHasRoles || role() == 1;
      if (row_before != kNone && adds_first) add_q(before(now), row_before);
      if (kGradOIsLate && role() == 1) pass_grad_o();
      run_chain(now);
      // Few writes are in flight here, so the release has little to wait for.
      if (Config::kIsOrdered && steps() - now.left > 1) pass_turn(before(before(now)));
      if (row_before != kNone && !adds_first) add_q(before(now), row_before);
      row_before = row(now);
    }
    Arch::sync();  // the last dS full
    if (steps() > 1) pass_turn(before(before(now)));
    add_q(before(now), row_before);
    if constexpr (Config::kIsOrdered) Arch::sync();  // dQ added
    pass_turn(before(now));
  }

 private:
  static constexpr int kStep = Config::kIsOrdered ? -1 : 1;  // between tiles of queries

  CUTE_DEVICE int steps() const {
    return params.heads_per_kv * (block.range.end - block.range.begin);
  }
  CUTE_DEVICE Position next(Position at) const { return moved<kStep>(at, 1); }
  CUTE_DEVICE Position before(Position at) const { return moved<-kStep>(at, -1); }

  template <int kBy>
  CUTE_DEVICE Position moved(Position at, int steps) const {
    TileRange const& range = block.range;
    at.left -= steps;
    at.tile += kBy;
    if (kBy > 0 ? at.tile == range.end : at.tile < range.begin) {
      at.tile = kBy > 0 ? range.begin : range.end - 1;
      at.head += steps;
    }
    return at;
  }

  // If dQ is added in order: waits until all tiles of earlier keys that the step's queries see have
  // added their dQ. pass_turn() reports that this tile has. Each warp waits separately, so that the
  // other warps compute while one polls memory.
  CUTE_DEVICE void wait_for_turn(Position const& at) const {
    if constexpr (Config::kIsOrdered) {
      if (Arch::thread() % 32 == 0) {
        SeqLens const lens = block.seq.lens(p);
        int const first = at.tile * kBlockM;
        int const end = first + kBlockM < lens.q ? first + kBlockM : lens.q;
        TileRange const keys =
            params.template mask<Config::kIsGeneral>(lens).tiles(first, end, Config::kBlockN);
        Arch::wait_until(turn(at), block.tile.begin / Config::kBlockN - keys.begin);
      }
      Arch::sync_warp();
    }
  }
  CUTE_DEVICE void pass_turn(Position const& at) const {
    if constexpr (Config::kIsOrdered) {
      if (Arch::thread() != 0 || params.grad_q == nullptr) return;
      Arch::red_add_release(turn(at), 1);  // releases what all threads added before the barrier
    }
  }
  CUTE_DEVICE int32_t* turn(Position const& at) const {
    return params.turn_at(query_tile(at), at.tile * kBlockM);
  }

  CUTE_DEVICE void load_stationary() {
    Arch::template cp_async_wait_group<0>();
    Arch::sync();  // K, V, visible and queries_of_key full
    int const lane = Arch::thread() % 32;
    Address const rows = Products::key_rows(Arch::smem_address(shared.k), warp_n(), lane) +
                         Address(column_group(warp) * kGroupChunks * Config::TileKv::kChunkBytes);
    if constexpr (kHasRoles) {
      Products::load_stationary(rows + Address(role() * Config::kVDistance), 0, stationary[0]);
    } else {
      Products::load_stationary(rows, 0, stationary[0]);
      Products::load_stationary(rows, Config::kVDistance, stationary[Config::kChains - 1]);
    }
    if constexpr (!Config::kKeepsV) Arch::sync();  // the buffer of V empty
  }

  // Starts the copies of Q, dO and the statistics of a step, if the step exists. With roles, warps
  // of the first role copy Q and warps of the second role copy dO, so that a warp computes
  // addresses of one operand only.
  CUTE_DEVICE void copy(Position const& at) const {
    if (at.left > 0) {
      constexpr int kThreads = kHasRoles ? Config::kThreads / 2 : Config::kThreads;
      using Copy = TileCopy<Arch, Element, TileQ, kThreads>;
      int const thread = opaque_index(Arch::thread()), of_copy = thread % kThreads;
      int const stage = at.stage(), first = at.tile * kBlockM;
      int const queries = block.seq.lens(p).q - first;
      auto const load = [&](Operand const& from, void const* rows, Address to, int columns) {
        // Neither factor is negative, which saves half of a 64-bit product.
        Element const* const source =
            static_cast<Element const*>(rows) + int64_t(unsigned(at.head)) * from.head_stride +
            int64_t(unsigned(first + Copy::row(of_copy))) * from.row_stride + Copy::column(of_copy);
        Copy::load(to + Copy::offset(of_copy), source, from.row_stride, queries, columns, of_copy);
      };
      if (!kHasRoles || role() == 0) {
        load(p.q, shared.from.q, stage_of(shared.stages.q, stage), p.head_dim);
      }
      if (!kHasRoles || role() == 1) {
        load(params.grad.o, shared.from.grad_o, stage_of(shared.stages.grad_o, stage),
             p.head_dim_v);
      }
      if (thread < kBlockM / 2) {
        float const* const from = shared.from.stats + (uint64_t(row(at)) + thread * 2) * 2;
        Arch::cp_async(stage_of(shared.stats, stage) + Address(thread * 16), from, true);
      }
    }
    Arch::cp_async_commit_group();
  }

  // If dO is copied at the beginning of its step: the warps of the second role, which copy it, wait
  // until it has landed, then signal the first role, which waits where it needs dO.
  static constexpr int kGradOBarrier = 1 + Config::kPairs * Config::kSlices;
  static constexpr int kSumBarrier = kGradOBarrier + Config::kGradOBarriers;
  static constexpr int kGroupChunks = Config::kColumns / TileQ::kChunk;  // of a column group
  CUTE_DEVICE static void pass_grad_o() {
    Arch::template cp_async_wait_group<0>();
    Arch::sync(kGradOBarrier, Config::kThreads / 2);    // dO full
    Arch::arrive(kGradOBarrier + 1, Config::kThreads);  // dO full, for the first role
  }
  CUTE_DEVICE static void wait_for_grad_o(int slice) {
    if (kGradOIsLate && slice == 0) Arch::sync(kGradOBarrier + 1, Config::kThreads);
  }

  // Address of buffer `stage` in an array of buffers. All stages share an array of one buffer.
  template <class T, int kCount>
  CUTE_DEVICE Address stage_of(T const (&buffers)[kCount], int stage) const {
    return Arch::smem_address(buffers) + (kCount > 1 ? Address(stage * int(sizeof(T))) : 0);
  }

  // Index of the workspace tile with a step's queries.
  CUTE_DEVICE int64_t query_tile(Position const& at) const {
    return params.queries.number<MmaBackwardParams::kTileRows, Config::kIsVarlen>(
        p.seq_q, {block.tile.batch, head(at), at.tile * kBlockM});
  }
  // Index of the step's first row, counted from the block's first query head.
  CUTE_DEVICE uint32_t row(Position const& at) const {
    return unsigned(at.head) * unsigned(params.queries.each) * MmaBackwardParams::kTileRows +
           unsigned(at.tile) * kBlockM;
  }
  CUTE_DEVICE int head(Position const& at) const {
    return block.tile.head * params.heads_per_kv + at.head;
  }

  CUTE_DEVICE void add_q(Position const& at, uint32_t row) const {
    if (params.grad_q == nullptr) return;
    wait_for_turn(at);
    // opaque: without it, the compiler keeps the upper half, which is 0, in a register.
    float* const to = shared.from.grad_q + uint64_t(opaque(row)) * unsigned(params.columns);
    Products::add_q(stage_of(shared.stages.grad_s, at.stage()), Arch::smem_address(shared.k), to,
                    params.columns, opaque_index(Arch::thread()));
  }

  // Products of a step over this warp's keys.
  CUTE_DEVICE void run_chain(Position const& at) {
    int const thread = opaque_index(Arch::thread()), lane = thread % 32;
    int const warp_n = thread / 32 % Config::kWarpsN;
    int const stage = at.stage();
    Address const q = stage_of(shared.stages.q, stage);
    int const o =
        kGradOIsLate ? int(stage_of(shared.stages.grad_o, 0) - q) : Config::kGradODistance;
    int const role = kHasRoles ? thread / 32 / Config::kPairs : 0;
    int const chunks = column_group(thread / 32) * kGroupChunks;
    Address const keys = Arch::smem_address(shared.k) + Address(role * Config::kVDistance) +
                         Address(chunks * Config::TileKv::kChunkBytes);
    Address const columns = q + Address(chunks * TileQ::kChunkBytes);
    Rows const rows{Products::key_rows(keys, warp_n, lane),
                    Products::query_columns(columns, lane) + Address(role * o),
                    Products::query_rows(columns, lane) + Address(kHasRoles ? (1 - role) * o : 0),
                    o};
    Address const stats = stage_of(shared.stats, stage);
    Address const s = stage_of(shared.stages.grad_s, stage) +
                      Address(TileS::offset(warp_n * Config::kWarpKeys + lane / 4, 0)) +
                      Address(lane % 4 * 4);
    Address const queries =
        Arch::smem_address(shared.queries_of_key) + Address(warp_n * Config::kWarpKeys * 8);
    StepPlace const place{block.tile.batch, head(at), block.tile.begin + warp_n * Config::kWarpKeys,
                          at.tile * kBlockM};
    VisibleQueries const visible = block.visible[warp_n];
#pragma unroll Config::kUnrolledSlices
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      int const first = place.first_query + slice * kSlice, last = first + kSlice - 1;
      Address const slice_stats = stats + Address(slice * kSlice * 8);
      if (last < visible.some_begin || first >= visible.some_end) {
        bool const stores_s = !kHasRoles || this->role() == 1;
        if (stores_s && column_group(warp) == 0) clear_s(slice, s);
        if (this->role() == 0) wait_for_grad_o(slice);
        continue;
      }
      bool const is_masked = first < visible.all_begin || last >= visible.all_end;
      if constexpr (kHasRoles) {
        run_role(role, place, slice, rows, slice_stats, s, queries, is_masked, lane,
                 thread / 32 % Config::kPairs);
      } else {
        run_both(place, slice, rows, slice_stats, s, queries, is_masked, lane);
      }
    }
  }

  // This lane's addresses for BackwardProducts. First role: keys in K, query_columns in Q,
  // query_rows in dO. Second role: V, dO, Q. Without roles: K, Q, Q.
  struct Rows {
    Address keys, query_columns, query_rows;
    int to_grad_o;  // from Q
  };

  CUTE_DEVICE void run_both(StepPlace const& place, int slice, Rows const& rows, Address stats,
                            Address s, Address queries, bool is_masked, int lane) {
    Slice x;
    Packed words;
    SavedWeights saved;
    auto const entries = scores.read_entries(place, block.seq.lens(p), slice, lane);
    Products::first(stationary[0], rows.keys, 0, rows.query_columns, 0, slice, x);
    typename Scores::Kept products;
    Scores::keep(x, products);
    scores.weights(x, place, block.seq.lens(p), slice, entries, stats, queries, is_masked, lane,
                   words, saved);
    Products::second(words, rows.query_rows, Config::kGradODistance, slice, grad[0]);
    Products::first(stationary[Config::kChains - 1], rows.keys, Config::kVDistance,
                    rows.query_columns, Config::kGradODistance, slice, x);
    add_bias(x, saved, place, slice, stats, lane);
    CapturedGrads<Scores> const captured{scores, place, slice, lane};
    captured.add_before(x, words, products, stats);
    scores.gradient(x, saved, stats, lane, words);
    captured.add_after(x, saved);
    Products::store_s(words, slice, s);
    Products::second(words, rows.query_rows, 0, slice, grad[Config::kChains - 1]);
  }

  // Both roles share one copy of the code of the products.
  CUTE_DEVICE void run_role(int role, StepPlace const& place, int slice, Rows const& rows,
                            Address stats, Address s, Address queries, bool is_masked, int lane,
                            int pair) {
    // Every slice of a step has a buffer and a barrier of its own for P, so that the first role
    // never waits.
    Address const handover =
        Arch::smem_address(shared.p) +
        Address((pair * kBlockM + slice * kSlice) * Config::kWarpKeys * 2 + lane * 16);
    int const barrier = 1 + pair * Config::kSlices + slice;
    Slice x;
    Packed words;
    SavedWeights saved;
    typename Scores::Entries entries;
    if (role == 0) entries = scores.read_entries(place, block.seq.lens(p), slice, lane);
    Products::first(stationary[0], rows.keys, 0, rows.query_columns, 0, slice, x);
    add_other_columns(role, pair, slice, lane, x);
    if (role == 0) {
      scores.weights(x, place, block.seq.lens(p), slice, entries, stats, queries, is_masked, lane,
                     words, saved);
      send(saved, handover);
      Arch::arrive(barrier, 64);  // P full
      wait_for_grad_o(slice);
    } else {
      CapturedGrads<Scores> const captured{scores, place, slice, lane};
      bool const is_first = column_group(pair) == 0;
      if constexpr (Scores::kKeepsProducts) {
        typename Scores::Kept products;
        recompute_weights(rows, place, slice, stats, queries, is_masked, lane, pair, products,
                          words);
        if (is_first) captured.add_before(x, words, products, stats);
      }
      Arch::sync(barrier, 64);  // P full
      receive(saved, handover);
      if (is_first) add_bias(x, saved, place, slice, stats, lane);
      scores.gradient(x, saved, stats, lane, words);
      if (is_first) captured.add_after(x, saved);
      if (is_first) Products::store_s(words, slice, s);
    }
    Products::second(words, rows.query_rows, 0, slice, grad[0]);
  }

  // S and P of a slice, for the second role: shared memory has no room for the first role to pass S
  // on.
  CUTE_DEVICE void recompute_weights(Rows const& rows, StepPlace const& place, int slice,
                                     Address stats, Address queries, bool is_masked, int lane,
                                     int pair, typename Scores::Kept& products,
                                     Packed& weights) const {
    Slice x;
    SavedWeights saved;
    Products::template first<0>(stationary[0], rows.keys, -Config::kVDistance, rows.query_columns,
                                -rows.to_grad_o, slice, x);
    if constexpr (Config::kColumnGroups > 1) {
      int const warp_n = pair % Config::kWarpsN;
      Arch::sync(kSumBarrier + Config::kWarpsN + warp_n, 64);  // the parts of dP empty
    }
    add_other_columns(1, pair, slice, lane, x);
    Scores::keep(x, products);
    scores.weights(x, place, block.seq.lens(p), slice, {}, stats, queries, is_masked, lane, weights,
                   saved);
  }

  // Adds the other column group's part of S or dP. Both warps get equal bits: a sum of two does not
  // depend on the order. The next step overwrites the parts after a barrier of the block.
  CUTE_DEVICE void add_other_columns(int role, int pair, int slice, int lane, Slice& x) const {
    if constexpr (Config::kColumnGroups > 1) {
      int const group = column_group(pair), warp_n = pair % Config::kWarpsN;
      auto& parts = shared.parts[role][warp_n][slice];
      CUTE_UNROLL
      for (int n = 0; n < kSlice / 8; ++n) {
        CUTE_UNROLL
        for (int m = 0; m < Config::kKeyBlocks; ++m) {
          float const(&own)[4] = x.block(m, n);
          parts[group].blocks[n][m][lane] = {{own[0], own[1], own[2], own[3]}};
        }
      }
      Arch::sync(kSumBarrier + role * Config::kWarpsN + warp_n, 64);  // both parts full
      CUTE_UNROLL
      for (int n = 0; n < kSlice / 8; ++n) {
        CUTE_UNROLL
        for (int m = 0; m < Config::kKeyBlocks; ++m) {
          auto const other = parts[group ^ 1].blocks[n][m][lane];
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) x.block(m, n)[i] += other.values[i];
        }
      }
    }
  }

  // Adds dP of a slice to the bias gradient.
  CUTE_DEVICE void add_bias(Slice const& dp, SavedWeights const& saved, StepPlace const& at,
                            int slice, Address stats, int lane) const {
    if constexpr (Config::kHasBiasGrad) {
      Slice x = dp;
      scores.softmax_grad(x, saved.logits, stats, lane);
      add_to_bias<Scores>(params.grad.bias, x, at, slice, scores, lane);
    }
  }

  CUTE_DEVICE static void clear_s(int slice, Address s) {
    Packed zeros;
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < Config::kKeyBlocks; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) zeros[n][m][i] = 0;
      }
    }
    Products::store_s(zeros, slice, s);
  }

  CUTE_DEVICE static void send(SavedWeights const& saved, Address to) {
    send(saved.products, to);
    if constexpr (Config::kHasBiasGrad) send(saved.logits, to + Address(Config::kPBytes));
  }
  CUTE_DEVICE static void receive(SavedWeights& saved, Address from) {
    receive(saved.products, from);
    if constexpr (Config::kHasBiasGrad) receive(saved.logits, from + Address(Config::kPBytes));
  }
  CUTE_DEVICE static void send(Packed const& words, Address to) {
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < Config::kKeyBlocks; ++m)
        Arch::store_shared(to + Address((n * Config::kKeyBlocks + m) * 512), words[n][m]);
    }
  }
  CUTE_DEVICE static void receive(Packed& words, Address from) {
    CUTE_UNROLL
    for (int n = 0; n < kSlice / 16; ++n) {
      CUTE_UNROLL
      for (int m = 0; m < Config::kKeyBlocks; ++m)
        Arch::load_shared(from + Address((n * Config::kKeyBlocks + m) * 512), words[n][m]);
    }
  }
};

}  // namespace cutlass_attn::sm80
