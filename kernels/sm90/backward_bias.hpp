// The gradient of a bias, in tiles of 128 queries and 128 keys. A block computes several tiles.
//
// dS is summed over the dimensions that the bias broadcasts: batch entries, heads or tiles of
// queries. Each summand is a step, which recomputes P. The sum stays in fp32 registers and is
// stored once, without atomics, so results are deterministic.
//
//   Block:      two consumer warpgroups with 64 keys each, and a producer warp, which starts the
//               next tile while the consumers finish the present one
//   Registers:  S, dP and the sum, for a warpgroup's 64 keys and 128 queries
//   Shared:     the bias of a tile; a ring of pairs of tiles: K and Q, then V and dO
//
// S and dP have keys in rows, as in backward_consumer.hpp. Both are issued together, so that the
// tensor cores multiply dP while P is computed.
#pragma once

#include "core/vector.hpp"
#include "sm90/backward_config.hpp"
#include "sm90/backward_tile_bias.hpp"
#include "tile/backward_scores.hpp"

namespace cutlass_attn::sm90 {

// A step, as the producer publishes it.
struct alignas(16) BiasStep {
  int32_t tile;  // of the gradient; negative: no step is left
  int32_t first_key, batch, head, query;
  int32_t is_seen;  // 0: no query of the tile sees a key in any step; this step is empty
  int32_t is_first, is_last;
};

// Main: BackwardConfig of the kernel that these blocks belong to.
template <class Main>
struct BiasGradConfig {
  using Element = typename Main::Element;
  using SeqInfo = typename Main::SeqInfo;
  using Params = WithBiasGrad<typename Main::Params>;
  static constexpr bool kHasMask = Main::kHasMask;
  static constexpr int kHeadDim = Main::kHeadDim, kBlockM = Params::kBiasQueries;
  static constexpr int kBlockN = Params::kBiasKeys;
  static constexpr int kGroups = 2, kGroupThreads = 128, kThreads = Main::kThreads;
  static constexpr int kComputeThreads = kGroups * kGroupThreads;
  static constexpr int kFirstKeysGroup = kThreads / kGroupThreads - kGroups;
  static constexpr int kIdleRegisters = 32, kComputeRegisters = 224;
  static_assert(kBlockN == 64 * kGroups && kFirstKeysGroup == 2);

  // Traits required by BackwardScores.
  static constexpr bool kIsGeneral = false, kDrops = false, kMayDrop = false, kHasBiasGrad = false;
  static constexpr int kWarpKeys = 16, kKeyBlocks = 1, kSlice = kBlockM;
  static constexpr int kSteps = kHeadDim / 16, kStationary = 0;

  using Tile = SwizzledTile<128, kHeadDim>;  // of Q, K, V and dO
  using TileKv = Tile;
  using TileQ = Tile;
  using TileS = SwizzledTile<kBlockN, kBlockM>;
  using TileBias = SwizzledTile<kBlockM, 64>;  // (query, key), for a warpgroup's keys
  // A step uses two slots. Meanwhile, the pairs of the next step arrive.
  static constexpr int kSlots = kHeadDim == 128 ? 3 : 4;
  // Statistics arrive with Q but are read until the step ends, later than Q's slot is released.
  // With kStats buffers, a buffer is free when the step kStats later writes it.
  static constexpr int kStats = kSlots - 1;

  struct SharedStorage {
    alignas(1024) char tiles[kSlots][2][Tile::kBytes];
    char bias[kGroups][TileBias::kBytes];
    alignas(16) float stats[kStats][kBlockM][2];  // -LSE in log2, delta
    BiasStep steps[kStats];
    DropoutMask dropout;  // required by BackwardScores, not used
    arch::Barrier full[kSlots], empty[kSlots], bias_full, bias_empty;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

// Class of the mask of 64 queries, `queries` after the step's first, and 64 keys. bits: index of
// their tile in the map.
template <class Main>
CUTE_DEVICE TileClass class_of(QueryMap const& map, BiasStep const& step, int queries, int key,
                               int64_t& bits) {
  int const query_tile = (step.query + queries) / 64, key_tile = key / Main::kBlockN;
  if (query_tile >= map.query_tiles || key_tile >= map.key_tiles) return TileClass::kEmpty;
  bits = map.first_tile(step.batch, step.head, key_tile) + query_tile;
  return map.classes[bits];
}

// The producer warp.
template <class Main, class Arch>
struct BiasGradProducer {
  using Config = BiasGradConfig<Main>;
  using Params = typename Config::Params;
  using Shared = typename Config::SharedStorage;
  using Tile = typename Config::Tile;
  static constexpr int kM = Config::kBlockM;
  using Stats = Quad;  // of two queries

  Params const& params;
  Shared& shared;
  SeqLens const lens;
  Ring<Config::kSlots> ring = {};
  Ring<Config::kStats> stats_ring = {};
  int bias_round = 0;
  int word = -1;      // present group of 32 steps
  uint32_t seen = 0;  // steps of the group in which any logit is visible

  CUTE_DEVICE BiasGradProducer(Params const& params, Shared& shared, SeqLens const& lens)
      : params(params), shared(shared), lens(lens) {}

  CUTE_DEVICE void run(int first, int end) {
    IntervalMask const mask = params.template mask<false>(lens);
    CUTE_NO_UNROLL
    for (int i = first; i < end; ++i) {
      BiasTile tile = params.bias_tile(i);
      if constexpr (!Config::kHasMask) {
        int const end = tile.first_key + Config::kBlockN;
        tile.keep(mask.query_tiles(tile.first_key, end < lens.k ? end : lens.k, kM), kM);
      }
      word = -1;
      int at = next_seen(tile, 0);
      if (at == tile.steps) copy(tile, {i, 0, 0, 0, 0, 0, 1, 1});
      bool is_first = true;
      CUTE_NO_UNROLL
      while (at < tile.steps) {
        BiasStep step = step_of(tile, at);
        step.tile = i, step.is_seen = 1, step.is_first = is_first;
        at = next_seen(tile, at + 1);
        step.is_last = at == tile.steps;
        copy(tile, step);
        is_first = false;
      }
    }
    copy({}, {-1, 0, 0, 0, 0, 0, 0, 0});
  }

 private:
  CUTE_DEVICE static BiasStep step_of(BiasTile const& tile, int number) {
    int const batch = number / tile.steps_of_batch, rest = number - batch * tile.steps_of_batch;
    int const head = rest / tile.query_tiles, query = rest - head * tile.query_tiles;
    return {0,
            tile.first_key,
            tile.batch + batch,
            tile.head + head,
            tile.first_query + query * kM,
            0,
            0,
            0};
  }

  // First step from `number` on in which any logit is visible. Called by all lanes.
  CUTE_DEVICE int next_seen(BiasTile const& tile, int number) {
    if constexpr (Config::kHasMask) {
      CUTE_NO_UNROLL
      for (; number < tile.steps; number = word * 32 + 32) {
        if (number / 32 != word) {
          word = number / 32;
          seen = Arch::ballot(is_seen(tile, word * 32 + Arch::thread() % 32));
        }
        for (; number / 32 == word; ++number) {
          if (seen >> number % 32 & 1) return number;
        }
      }
    }
    return number < tile.steps ? number : tile.steps;
  }
  CUTE_DEVICE bool is_seen(BiasTile const& tile, int number) const {
    if (number >= tile.steps) return false;
    BiasStep const step = step_of(tile, number);
    bool is_seen = false;
    CUTE_NO_UNROLL
    for (int i = 0; i < 4; ++i) {
      int64_t bits;
      is_seen |= class_of<Main>(params.map, step, i % 2 * 64, tile.first_key + i / 2 * 64, bits) !=
                 TileClass::kEmpty;
    }
    return is_seen;
  }

  // Publishes a step and copies its tiles.
  CUTE_DEVICE void copy(BiasTile const& tile, BiasStep const& step) {
    int const lane = Arch::thread(), kv = step.head / params.heads_per_kv;
    Stats stats[2] = {};
    if (step.is_seen) stats[0] = stats_of(step, 0, lane), stats[1] = stats_of(step, 1, lane);
    Arch::mbarrier_wait(&shared.empty[ring.stage], ring.round ^ 1);
    auto* const to = reinterpret_cast<Stats*>(shared.stats[stats_ring.stage]);
    to[lane] = stats[0], to[32 + lane] = stats[1];
    if (lane == 0) shared.steps[stats_ring.stage] = step;
    Arch::sync_warp();
    if (Arch::elect()) copy_pair(step, tile, params.k, kv, params.q);
    ring.advance();
    stats_ring.advance();
    if (step.tile < 0) return;
    if (step.is_seen && step.is_first) {
      Arch::mbarrier_wait(&shared.bias_empty, bias_round ^ 1);
      if (Arch::elect()) copy_bias(tile);
      bias_round ^= 1;
    }
    Arch::mbarrier_wait(&shared.empty[ring.stage], ring.round ^ 1);
    if (Arch::elect()) copy_pair(step, tile, params.v, kv, params.grad_o);
    ring.advance();
  }

  CUTE_DEVICE void copy_bias(BiasTile const& tile) const {
    using TileBias = typename Config::TileBias;
    Arch::mbarrier_arrive_expect_tx(&shared.bias_full, Config::kGroups * TileBias::kBytes);
    CUTE_UNROLL
    for (int i = 0; i < Config::kGroups * kM / 64; ++i) {
      int const group = i % Config::kGroups, rows = i / Config::kGroups * 64;
      Arch::tma_load(shared.bias[group] + rows * TileBias::kRowBytes, params.bias,
                     &shared.bias_full, tile.first_key + group * 64, 0, tile.first_query + rows,
                     tile.head, tile.batch);
    }
  }

  // Copies a tile of keys and a tile of queries.
  CUTE_DEVICE void copy_pair(BiasStep const& step, BiasTile const& tile, DenseRows const& keys,
                             int kv, DenseRows const& queries) const {
    arch::Barrier* const full = &shared.full[ring.stage];
    Arch::mbarrier_arrive_expect_tx(full, step.is_seen ? 2 * Tile::kBytes : 0);
    if (!step.is_seen) return;
    SequenceRows const of = {step.batch, 0, 0};
    copy_boxes<Tile, Arch>(keys, shared.tiles[ring.stage][0], full, tile.first_key, kv, of);
    copy_boxes<Tile, Arch>(queries, shared.tiles[ring.stage][1], full, step.query, step.head, of);
  }

  // Statistics of this lane's two queries among the 64 of the tile, or among the next 64.
  CUTE_DEVICE Stats stats_of(BiasStep const& step, int half, int lane) const {
    int const query = step.query + half * 64;
    if (query >= lens.q) return {{-kInf, 0.0f, -kInf, 0.0f}};
    int64_t const number = params.queries.template number<64, false>(
        params.problem.seq_q, {step.batch, step.head, query});
    return reinterpret_cast<Stats const*>(params.stats + number * 128)[lane];
  }
};

// A consumer warpgroup.
template <class Main, class Score, class Arch>
struct BiasGradConsumer {
  using Config = BiasGradConfig<Main>;
  using Element = typename Config::Element;
  using Params = typename Config::Params;
  using Shared = typename Config::SharedStorage;
  using Address = typename Arch::SmemAddress;
  using Tile = typename Config::Tile;
  using Products = BackwardProducts<Config, Arch>;
  using Scores = BackwardScores<Config, Score, Arch>;
  using Slice = typename Products::Slice;
  static constexpr int kM = Config::kBlockM;

  Params const& params;
  Problem const& p;
  Shared& shared;
  SeqLens const lens;
  int const group;
  Scores const scores;
  Ring<Config::kSlots> ring = {};
  Ring<Config::kStats> stats_ring = {};
  int bias_round = 0;
  Slice sum;

  CUTE_DEVICE BiasGradConsumer(Params const& params, Shared& shared, SeqLens const& lens, int group)
      : params(params),
        p(params.problem),
        shared(shared),
        lens(lens),
        group(group),
        scores{p, score_in_log2<Score>(p, lens), score_in_log2<Score>(p, lens).log2_scale(),
               shared.dropout} {}

  CUTE_DEVICE static int thread() {
    return opaque(Arch::thread()) - Config::kFirstKeysGroup * Config::kGroupThreads;
  }

  CUTE_DEVICE void run() {
    clear(sum);
    CUTE_NO_UNROLL
    while (true) {
      Arch::mbarrier_wait(&shared.full[ring.stage], ring.round);
      BiasStep const step = shared.steps[stats_ring.stage];
      if (step.tile < 0) return;
      if (step.is_seen) {
        add(step);
      } else {
        skip();
      }
      if (step.is_last) {
        if (step.is_seen) {
          arrive<Arch>(&shared.bias_empty);
          bias_round ^= 1;
        }
        store(params.bias_tile(step.tile));
        clear(sum);
      }
    }
  }

 private:
  CUTE_DEVICE void skip() {
    for (int i = 0; i < 2; ++i) {
      Arch::mbarrier_wait(&shared.full[ring.stage], ring.round);
      arrive<Arch>(&shared.empty[ring.stage]);
      ring.advance();
    }
    stats_ring.advance();
  }

  CUTE_DEVICE void add(BiasStep const& step) {
    int const thread = BiasGradConsumer::thread(), lane = thread % 32;
    int const first_key = step.first_key;
    Address const stats = Arch::smem_address(shared.stats[stats_ring.stage]);
    Bits const bits = load_bits(step, first_key, thread);
    Slice x, dp;
    int const slot = ring.stage;
    issue(slot, x);
    ring.advance();
    Arch::mbarrier_wait(&shared.full[ring.stage], ring.round);
    issue(ring.stage, dp);
    Arch::template wgmma_wait<1>(x.x);
    arrive<Arch>(&shared.empty[slot]);
    if (step.is_first) Arch::mbarrier_wait(&shared.bias_full, bias_round);

    StepPlace const place{step.batch, step.head, first_key + thread / 32 * Config::kWarpKeys,
                          step.query};
    typename Products::Packed words;  // not used, like `saved`: x also has P, in fp32
    typename Scores::SavedWeights saved;
    Extra const extra{*this, bits, place, thread};
    scores.weights(x, place, lens, 0, {}, stats, {}, false, lane, words, saved, extra);
    Arch::template wgmma_wait<0>(dp.x);
    arrive<Arch>(&shared.empty[ring.stage]);
    CUTE_UNROLL
    for (int n = 0; n < kM / 8; ++n) {
      CUTE_UNROLL
      for (int j = 0; j < 2; ++j) {
        float stat[2];
        Arch::load_shared(stats + Address((n * 8 + lane % 4 * 2 + j) * 8), stat);
        CUTE_UNROLL
        for (int i = j; i < 4; i += 2) {
          sum(i, 0, n) = fmaf(x(i, 0, n), dp(i, 0, n) - stat[1], sum(i, 0, n));
        }
      }
    }
    ring.advance();
    stats_ring.advance();
  }

  // x = (K or V) (Q or dO)^T, for this warpgroup's keys.
  CUTE_DEVICE void issue(int slot, Slice& x) const {
    auto const a = Arch::descriptor(shared.tiles[slot][0] + group * 64 * Tile::kRowBytes, 16, 1024);
    auto const b = Arch::descriptor(shared.tiles[slot][1], 16, 1024);
    Arch::wgmma_fence(x.x);
    CUTE_UNROLL
    for (int i = 0; i < Config::kSteps; ++i) {
      Arch::template wgmma_ss<Element>(x.x, a + column_step<Tile>(i), b + column_step<Tile>(i),
                                       i != 0);
    }
    Arch::wgmma_commit();
  }

  struct Bits {  // of this thread's first 64 queries, and of the next 64
    uint32_t of[2];
  };
  CUTE_DEVICE Bits load_bits(BiasStep const& step, int first_key, int thread) const {
    Bits bits = {{~0u, ~0u}};
    if constexpr (Config::kHasMask) {
      int const key = first_key + group * 64;
      int const of_map = key / 64 % Main::kGroups * Config::kGroupThreads;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int64_t number;
        TileClass const found = class_of<Main>(params.map, step, half * 64, key, number);
        if (found == TileClass::kEmpty) bits.of[half] = 0;
        if (found == TileClass::kPartial) {
          bits.of[half] =
              params.map
                  .bits[number * Main::kComputeThreads + of_map + thread % Config::kGroupThreads];
        }
      }
    }
    return bits;
  }

  // Hooks of BackwardScores.
  struct Extra {
    BiasGradConsumer const& of;
    Bits const bits;
    StepPlace const& place;
    int const thread;

    // Also applies the mask, in a kernel without a map.
    CUTE_DEVICE void add_bias(Score const& score, Slice& x) const {
      add_tile_bias<typename Config::TileBias, Arch, Element>(of.shared.bias[of.group], thread,
                                                              score, x);
      if constexpr (!Config::kHasMask) {
        IntervalMask const mask = of.params.template mask<false>(of.lens);
        int const last = place.first_key + Config::kWarpKeys - 1;
        bool const sees_all = last < of.lens.k && mask.q_lo(last) <= place.first_query &&
                              mask.q_hi(place.first_key) >= place.first_query + kM;
        unpredicated_if(!sees_all, [&] { apply(mask, x); });
      }
    }
    CUTE_DEVICE void apply(IntervalMask const& mask, Slice& x) const {
      int const lane = opaque(thread) % 32;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const key = place.first_key + half * 8 + lane / 4;
        int const first = place.first_query + lane % 4 * 2;
        int const begin = mask.q_lo(key) - first;
        int const end = key < of.lens.k ? mask.q_hi(key) - first : begin;
        CUTE_UNROLL
        for (int n = 0; n < kM / 8; ++n) {
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            float& s = x(2 * half + i, 0, n);
            s = n * 8 + i >= begin && n * 8 + i < end ? s : -kInf;
          }
        }
      }
    }
    CUTE_DEVICE void apply_bits(Slice& x) const {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        unpredicated_if(Arch::any(bits.of[half] != ~0u), [&] {
          CUTE_UNROLL
          for (int i = 0; i < 32; ++i) {
            float& s = x.x[half * 32 + i];
            s = bits.of[half] >> i & 1 ? s : -kInf;
          }
        });
      }
    }
    CUTE_DEVICE void keep(int, typename Scores::SavedWeights const&) const {}
  };

  // --- The sum -----------------------------------------------------------------------------------

  CUTE_DEVICE void store(BiasTile const& tile) {
    if (params.grad.bias_dtype == DType::kFloat32) {
      store_as<float>(tile);
    } else {
      store_as<Element>(tile);
    }
  }
  template <class T>
  CUTE_DEVICE void store_as(BiasTile const& tile) {
    PerLogit const& to = params.grad.bias;
    int const thread = BiasGradConsumer::thread(), lane = thread % 32;
    T* const of_head = static_cast<T*>(const_cast<void*>(to.data)) + tile.batch * to.batch_stride +
                       tile.head * to.head_stride;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const key = tile.first_key + thread / 32 * Config::kWarpKeys + half * 8 + lane / 4;
      T* const of_key = of_head + key * to.key_stride;
      if (to.row_stride == 0) {
        float const all = sum_of_queries(half);
        if (lane % 4 == 0 && key < lens.k) *of_key = T(all);
        continue;
      }
      int const first = tile.first_query + lane % 4 * 2;
      int const rows = key < lens.k ? lens.q - first : 0;
      T* row = of_key + first * to.row_stride;
      CUTE_UNROLL
      for (int n = 0; n < kM / 8; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          if (n * 8 + i < rows) row[i * to.row_stride] = T(sum(2 * half + i, 0, n));
        }
        row += 8 * to.row_stride;
      }
    }
  }
  // Sum of a key over this warp's 128 queries.
  CUTE_DEVICE float sum_of_queries(int half) const {
    float all = 0.0f;
    CUTE_UNROLL
    for (int n = 0; n < kM / 8; ++n) all += sum(2 * half, 0, n) + sum(2 * half + 1, 0, n);
    CUTE_UNROLL
    for (int lanes = 1; lanes < 4; lanes *= 2) all += Arch::shuffle_xor(all, lanes);
    return all;
  }
};

// A block that computes the gradient of a bias; `number`: its index among those blocks. Called by
// all threads.
template <class Main, class Score, class Arch, class Params, class Shared>
CUTE_DEVICE void run_bias_grad(Params const& params, Shared& shared, int number) {
  using Config = BiasGradConfig<Main>;
  if (Arch::thread() == 0) {
    for (int i = 0; i < Config::kSlots; ++i) {
      Arch::mbarrier_init(&shared.full[i], 1);
      Arch::mbarrier_init(&shared.empty[i], Config::kComputeThreads / 32);
    }
    Arch::mbarrier_init(&shared.bias_full, 1);
    Arch::mbarrier_init(&shared.bias_empty, Config::kComputeThreads / 32);
    Arch::fence_mbarrier_init();
    shared.dropout = DropoutMask(params.problem);
  }
  Arch::sync();  // barriers initialised
  SeqLens const lens = DenseSeqInfo(params.problem, 0).lens(params.problem);
  int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads);
  if (group < Config::kFirstKeysGroup) {
    Arch::template setmaxnreg_dec<Config::kIdleRegisters>();
    if (Arch::thread() < 32) {
      int const first = number * params.bias_tiles_of_block;
      int const end = first + params.bias_tiles_of_block, tiles = params.bias_tiles();
      BiasGradProducer<Main, Arch>(params, shared, lens).run(first, end < tiles ? end : tiles);
    }
  } else {
    Arch::template setmaxnreg_inc<Config::kComputeRegisters>();
    BiasGradConsumer<Main, Score, Arch>(params, shared, lens, group - Config::kFirstKeysGroup)
        .run();
  }
}

}  // namespace cutlass_attn::sm90
