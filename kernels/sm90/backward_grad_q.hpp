// The warpgroup that multiplies dQ of each step, over all keys of the block, and adds it to global
// memory.
//
// By default, blocks add to a tile of queries in any order. In a deterministic backward pass each
// warp waits, for its 16 queries, until all earlier key tiles that these queries see have been
// added; so the sum is deterministic. The wait, and the release of the previous turn, overlap the
// product.
//
// dS, which the consumers store as (key, query), is a column-major A operand. dQ is multiplied in
// slices of 64 queries and 64 columns, because there are not enough registers for all of it.
#pragma once

#include "sm90/backward_producer.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct BackwardGradQ {
  using Element = typename Config::Element;
  using Shared = typename Config::SharedStorage;
  using TileKv = typename Config::TileKv;
  using TileS = typename Config::TileS;
  static constexpr int kM = Config::kBlockM, kColumns = TileKv::kChunk;
  static constexpr int kColumnSlices = Config::kHeadDim / kColumns;
  static constexpr int kSlices = Config::kTiles * kColumnSlices;
  using Slice = Fragment<float, 1, kColumns / 8>;

  using Params = typename Config::Params;
  using Steps = StepsOf<Config>;

  Params const& params;
  Shared& shared;
  Ring<Config::kKeyTiles> key_tile = {};
  Ring<Config::kStages> ring = {};

  // steps: of the block's only tile of keys, if it is not persistent.
  CUTE_DEVICE void run(int steps) {
    if constexpr (Config::kIsPersistent) {
      for (;;) {
        Arch::mbarrier_wait(&shared.tile_full[key_tile.stage], key_tile.round);
        if (!keys().exists) return;
        if (keys().num_steps > 0) run_tile(keys().num_steps);
        arrive<Arch>(&shared.tile_empty[key_tile.stage]);
        key_tile.advance();
      }
    } else {
      if (steps > 0) run_tile(steps);
    }
  }

 private:
  // The present tile of keys.
  CUTE_DEVICE auto const& keys() const { return shared.tiles[key_tile.stage]; }

  CUTE_DEVICE void run_tile(int steps) {
    BackwardProducer<Config, Arch> producer(params, shared);
    bool const copies = !Config::kCopiesApart && Arch::uniform(Arch::thread() / 32) == 0;
    if (copies) producer.begin();

    Steps at(params, keys());
    if constexpr (!Config::kIsPersistent) Arch::mbarrier_wait(&shared.tile_full[0], 0);
    int64_t before = 0;  // tile of the previous step
    CUTE_NO_UNROLL
    do {
      int64_t tile = 0;
      if constexpr (!Config::kHasMask) tile = at.number_of(params, keys().tile.batch);
      // In ordered mode the end of the step has no time to wait for memory. In unordered mode
      // loading this early costs 1 to 2 %.
      if (Config::kIsOrdered && copies) producer.load_stats();
      Arch::mbarrier_wait(&shared.grad_s_full[ring.stage], ring.round);
      if constexpr (Config::kHasMask) tile = at.number_of(params, 0);  // published by now
      int32_t done = 0;  // key tiles that have been added to this tile of queries
      CUTE_UNROLL
      for (int i = 0; i < kSlices; ++i) {
        int const tile_of_step = i / kColumnSlices, column = i % kColumnSlices * kColumns;
        Slice grad_q;
        issue(ring.stage, tile_of_step, column, registers_of(grad_q));
        if (i == 0) {  // both are round trips to L2, which overlap the product
          done = peek(tile);
          if (at.number > 0) pass_turn(before);
        }
        Arch::template wgmma_wait<0>(registers_of(grad_q));
        bool const is_last = i + 1 == kSlices;
        if (is_last) arrive<Arch>(&shared.grad_s_empty[ring.stage]);
        if (i == 0) wait_for_turn(at, tile, done);
        if (has_tile<Config>(params, keys(), at.present().tile, tile_of_step)) {
          add(tile + tile_of_step, column, grad_q);
        }
      }
      if (copies) Config::kIsOrdered ? producer.copy() : producer.next();
      before = tile;
      at.advance(keys().range);
      ring.advance();
    } while (at.number < steps);
    pass_turn(before);
  }

  // grad_q = dS^T K, for 64 queries, a tile of the workspace, and 64 columns
  template <class Registers>
  CUTE_DEVICE void issue(int stage, int tile_of_step, int column, Registers& grad_q) const {
    auto const a = Arch::descriptor(shared.grad_s[stage] + tile_of_step * TileS::kChunkBytes,
                                    TileS::kChunkBytes, 1024);
    // With two slices, opaque: descriptors of both would be moved to and from uniform registers.
    int const of_k = kColumnSlices > 1 ? opaque(key_tile.stage) : key_tile.stage;
    auto const b = Arch::descriptor(shared.k[of_k] + column / kColumns * TileKv::kChunkBytes,
                                    TileKv::kChunkBytes, 1024);
    Arch::wgmma_fence(grad_q);
    CUTE_UNROLL
    for (int i = 0; i < Config::kBlockN / 16; ++i) {
      Arch::template wgmma_ts<Element>(grad_q, a + i * 16 * TileS::kRowBytes / 16,
                                       b + i * 16 * TileKv::kRowBytes / 16, i != 0);
    }
    Arch::wgmma_commit();
  }

  // First query of this warp in a tile.
  CUTE_DEVICE static int first_query() { return Arch::thread() / 32 % 4 * 16; }

  CUTE_DEVICE void add(int64_t tile, int column, Slice const& grad_q) const {
    if (params.grad_q == nullptr) return;
    int const first = column / 8, end = params.columns / 8 - first;
    float* const to = params.grad_q_at(tile, first_query()) + first * 128 +
                      Arch::place_of(Arch::thread() % 32, 0);
    CUTE_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      if (n >= end) break;
      Arch::red_add(to + n * 128, grad_q.block(0, n));
    }
  }

  CUTE_DEVICE bool takes_turns() const {
    return Config::kIsOrdered && Arch::thread() % 32 == 0 && params.grad_q != nullptr;
  }
  CUTE_DEVICE int32_t* turn(int64_t tile) const { return params.turn_at(tile, first_query()); }

  CUTE_DEVICE int32_t peek(int64_t tile) const {
    return takes_turns() ? Arch::ld_relaxed(turn(tile)) : 0;
  }
  // Waits until all earlier key tiles have been added. `done` is valid: it was read before the
  // previous turn was released.
  CUTE_DEVICE void wait_for_turn(Steps const& at, int64_t tile, int32_t done) const {
    if constexpr (Config::kIsOrdered) {
      if (takes_turns()) {
        SeqLens const lens = keys().seq.lens(params.problem);
        int const first = at.tile * kM, end = first + kM < lens.q ? first + kM : lens.q;
        TileRange const keys = params.template mask<false>(lens).tiles(first, end, Config::kBlockN);
        int32_t const earlier = this->keys().tile.begin / Config::kBlockN - keys.begin;
        if (at.number == 0 || done < earlier) Arch::wait_until(turn(tile), earlier);
      }
      Arch::sync_warp();
    }
  }
  CUTE_DEVICE void pass_turn(int64_t tile) const {
    if constexpr (Config::kIsOrdered) {
      Arch::sync_warp();  // all lanes have added
      if (takes_turns()) Arch::red_add_acq_rel(turn(tile), 1);
    }
  }
};

}  // namespace cutlass_attn::sm90
