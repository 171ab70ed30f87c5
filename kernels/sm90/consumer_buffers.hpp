// Base of the consumer warpgroups: waits for and releases the producer's buffers, and stores O.
#pragma once

#include "core/epilogue.hpp"
#include "core/opaque.hpp"
#include "core/terms/max_logit.hpp"
#include "core/vector.hpp"
#include "sm90/config.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Arch>
struct ConsumerBuffers {
  using Shared = typename Config::SharedStorage;
  using Info = typename Config::TileInfo;
  using Place = typename Config::Place;
  static constexpr int kN = Config::kBlockN;

  Shared& shared;
  int const group;  // this warpgroup
  Ring<Config::kKStages> k = {};
  Ring<Config::kVStages> v = {};
  uint32_t taken = 0;  // tiles of rows

  CUTE_DEVICE ConsumerBuffers(Shared& shared, int group) : shared(shared), group(group) {}

  // Index among the consumer threads. Recomputed at each use: keeping it would cost a register.
  CUTE_DEVICE static int thread() { return opaque(Arch::thread()) - Config::kGroupThreads; }

  // The next tile of rows; its `exists` is 0 if none is left.
  CUTE_DEVICE Info* take() {
    int const stage = stage_of<Config::kInfos>(taken), round = round_of<Config::kInfos>(taken);
    Arch::mbarrier_wait(&shared.info_full[stage], round);
    ++taken;
    return &shared.info(stage);
  }
  // Buffers of the tile that was taken last.
  CUTE_DEVICE int info_stage() const { return stage_of<Config::kInfos>(taken - 1); }
  CUTE_DEVICE int q_stage() const { return stage_of<Config::kQStages>(taken - 1); }
  CUTE_DEVICE void wait_for_q() const {
    int const round = round_of<Config::kQStages>(taken - 1);
    Arch::mbarrier_wait(&shared.q_full[q_stage()][group], round);
  }

  // Tiles of keys that are copied before and after this warpgroup's own tiles.
  CUTE_DEVICE int leading(Info const& info) const {
    if constexpr (Config::kHasMask) return 0;
    return (info.range.end - info.ranges[group].end) / kN;
  }
  CUTE_DEVICE int trailing(Info const& info) const {
    if constexpr (Config::kHasMask) return 0;
    return (info.ranges[group].begin - info.range.begin) / kN;
  }
  CUTE_DEVICE void skip(int tiles) {
    CUTE_NO_UNROLL
    for (int i = 0; i < tiles; ++i) {
      skip_k();
      skip_v();
    }
  }
  // A buffer may only be released once it is full, or its previous round would end too early.
  CUTE_DEVICE void skip_k() {
    Arch::mbarrier_wait(&shared.k_full[k.stage], k.round);
    k.advance();
    Arch::sync_warp();
    release_k();
  }
  CUTE_DEVICE void skip_v() {
    Arch::mbarrier_wait(&shared.v_full[v.stage], v.round);
    v.advance();
    Arch::sync_warp();
    release_v();
  }

  // Releases the K or V that was used last.
  CUTE_DEVICE int k_stage() const { return k.last(); }
  CUTE_DEVICE void release_k() {
    if constexpr (Config::kHasBias) Arch::sync_warp();  // all lanes have read their part of it
    release(&shared.k_empty[k_stage()]);
  }
  CUTE_DEVICE void release_v() { release(&shared.v_empty[v.last()]); }
  // Each warp arrives for itself, since warps may diverge. All its lanes must have passed their
  // wait for this round of the buffer, or a late lane would wait for a round that is over: callers
  // have a wgmma_wait() or a sync_warp() before.
  CUTE_DEVICE void release(arch::Barrier* empty) {
    if (thread() % 32 == 0) Arch::mbarrier_arrive(empty);
  }

  // Normalises and stores the rows of a tile.
  //   o:           (row, column)
  //   kept_scale:  factor of all of O
  template <class Coord, class Softmax, class O>
  CUTE_DEVICE static void store_rows(Problem const& problem, Coord const& tile, Softmax& done,
                                     O const& o, float kept_scale) {
    using Element = typename Config::Element;
    int const thread = ConsumerBuffers::thread(), lane = thread % 4;  // of a quad
    done.complete_sums();
    done.complete_largest();
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      int const row = Place{thread}.row(i);
      bool const is_inside = row < tile.rows;
      if constexpr (Softmax::kKeeps) {
        if (lane == 0 && is_inside) {
          float const largest = done.largest.of_row[i];
          MaxLogit::store(problem, tile.seq, tile.head(row), tile.query(row), largest);
        }
      }
      float factor = finish_row(problem, tile.seq, tile.head(row), tile.query(row), done.rows[i],
                                1.0f, lane == 0 && is_inside);
      if constexpr (Config::kDrops) factor *= kept_scale;
      Element* const target = tile.template row_of<Element>(problem.o, row) + lane * 8;
      CUTE_UNROLL
      for (int n = 0; n < Config::kHeadDimV / 8; n += 4) {
        uint32_t words[4];
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          int const column = 2 * (n + j);
          words[j] = Arch::template pack<Element>(o(i, column) * factor, o(i, column + 1) * factor);
        }
        transpose_quad<Arch>(words, lane);
        if (is_inside && n * 8 + lane * 8 < problem.head_dim_v) {
          *reinterpret_cast<Vector16*>(target + n * 8) = *reinterpret_cast<Vector16 const*>(words);
        }
      }
    }
  }
};

}  // namespace cutlass_attn::sm90
