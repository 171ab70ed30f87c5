// The gradient of a bias: a tile of 128 queries and 128 keys of it, as a block computes it.
//
// dS of a tile is summed over all that the bias is broadcast over: batch entries, heads, or tiles of
// queries. Each of them is a step, which recomputes P. The sum stays in registers, in fp32, and is
// stored once: there are no additions to memory, and results are deterministic.
//
//   Block:      two warpgroups with 64 keys each, and a warp that copies
//   Registers:  S, dP and the sum of a warpgroup's 64 keys and 128 queries
//   Shared:     the bias; a ring of pairs of tiles: K and Q, then V and dO
//
// S and dP have keys in rows, as in backward_consumer.hpp. They are multiplied together, so that the
// tensor cores multiply dP while P is computed.
#pragma once

#include "sm80/backward_scores.hpp"
#include "sm90/backward_config.hpp"
#include "sm90/backward_tile_bias.hpp"

namespace cutlass_attn::sm90 {

// Main: the BackwardConfig of the kernel whose blocks these are.
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
  static constexpr int kIdleRegisters = 24, kComputeRegisters = 232;
  static_assert(kBlockN == 64 * kGroups && kFirstKeysGroup == 2);

  // Traits that sm80::BackwardScores asks for.
  static constexpr bool kIsGeneral = false, kDrops = false, kMayDrop = false, kKeepsWeights = true;
  static constexpr int kWarpKeys = 16, kKeyBlocks = 1, kSlice = kBlockM;
  static constexpr int kSteps = kHeadDim / 16, kStationary = 0;

  using Tile = SwizzledTile<128, kHeadDim>;  // of Q, K, V and dO
  using TileKv = Tile;
  using TileQ = Tile;
  using TileS = SwizzledTile<kBlockN, kBlockM>;
  using TileBias = SwizzledTile<kBlockM, 64>;  // of a warpgroup's keys: query, key
  // A step has two pairs. While it is computed, those of the next one arrive.
  static constexpr int kSlots = kHeadDim == 128 ? 3 : 4;
  // The statistics of a step come with Q, and are read until dS is there. Q is given back before.
  static constexpr int kStats = kSlots - 1;
  // A row of the sum in shared memory, padded so that 8 keys of 4 queries are in 32 banks.
  static constexpr int kSumRow = kBlockN + 4;

  struct Sum {
    alignas(1024) float sum[kBlockM][kSumRow];
  };
  struct Copies {
    alignas(1024) char tiles[kSlots][2][Tile::kBytes];
    char bias[kGroups][TileBias::kBytes];
    alignas(16) float stats[kStats][kBlockM][2];  // -LSE in log2, delta
    uint32_t seen[kHasMask ? Params::kMostSteps / 32 : 1];  // steps with any visible logit
    DropoutMask dropout;                                    // which is not used
    arch::Barrier full[kSlots], empty[kSlots], bias_full;
  };
  union SharedStorage {
    Copies copies;
    Sum sum;  // once all steps are done
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024);
};

// The steps of a block.
template <class Config>
struct BiasSteps {
  using Params = typename Config::Params;
  BiasTile const tile;
  int number = 0, batch, head, query;

  CUTE_DEVICE BiasSteps(Params const& params, BiasTile const& tile) : tile(tile) { set(params); }
  CUTE_DEVICE void advance(Params const& params) {
    ++number;
    set(params);
  }

 private:
  CUTE_DEVICE void set(Params const& params) {
    int const of_batch = number / tile.steps_of_batch;
    int const rest = number - of_batch * tile.steps_of_batch, of_head = rest / tile.query_tiles;
    batch = tile.batch + of_batch;
    head = tile.head + of_head;
    query = tile.first_query + (rest - of_head * tile.query_tiles) * Config::kBlockM;
  }
};

template <class Main, class Score, class Arch>
struct BiasGrad {
  using Config = BiasGradConfig<Main>;
  using Element = typename Config::Element;
  using Params = typename Config::Params;
  using Shared = typename Config::SharedStorage;
  using Copies = typename Config::Copies;
  using Address = typename Arch::SmemAddress;
  using Tile = typename Config::Tile;
  using TileBias = typename Config::TileBias;
  using Products = sm80::BackwardProducts<Config, Arch>;
  using Scores = sm80::BackwardScores<Config, Score, Arch>;
  using Slice = typename Products::Slice;
  static constexpr int kM = Config::kBlockM;

  Params const& params;
  Problem const& p;
  Shared& whole;
  Copies& shared;
  BiasTile const tile;
  SeqLens const lens;
  IntervalMask const mask;

  // By all threads of the block with this number among those of the gradient.
  CUTE_DEVICE static void run(Params const& params, Shared& shared, int number) {
    SeqLens const lens = DenseSeqInfo(params.problem, 0).lens(params.problem);
    IntervalMask const mask = params.template mask<false>(lens);
    BiasTile tile = params.bias_tile(number);
    if constexpr (!Config::kHasMask) {
      int const end = tile.first_key + Config::kBlockN;
      tile.keep(mask.query_tiles(tile.first_key, end < lens.k ? end : lens.k, kM), kM);
    }
    BiasGrad{params, params.problem, shared, shared.copies, tile, lens, mask}.run();
  }

 private:
  CUTE_DEVICE void run() const {
    if (Arch::thread() == 0) init();
    if constexpr (Config::kHasMask) share_seen();
    Arch::sync();  // barriers and `seen` are there
    int const group = Arch::uniform(Arch::thread() / Config::kGroupThreads);
    if (group < Config::kFirstKeysGroup) {
      Arch::template registers_decrease<Config::kIdleRegisters>();
      if (Arch::thread() < 32) copy();
    } else {
      Arch::template registers_increase<Config::kComputeRegisters>();
      compute(group - Config::kFirstKeysGroup);
    }
  }

  CUTE_DEVICE void init() const {
    for (int i = 0; i < Config::kSlots; ++i) {
      Arch::barrier_init(&shared.full[i], 1);
      Arch::barrier_init(&shared.empty[i], Config::kComputeThreads / 32);
    }
    Arch::barrier_init(&shared.bias_full, 1);
    Arch::barrier_init_fence();
    shared.dropout = DropoutMask(p);
  }

  // --- What a mask leaves ------------------------------------------------------------------------

  // Its class, of 64 queries and 64 keys. bits: the number of the map's tile.
  CUTE_DEVICE TileClass class_of(int batch, int head, int query, int key, int64_t& bits) const {
    QueryMap const& map = params.map;
    int const query_tile = query / 64, key_tile = key / Main::kBlockN;
    if (query_tile >= map.query_tiles || key_tile >= map.key_tiles) return TileClass::kEmpty;
    bits = map.first_tile(batch, head, key_tile) + query_tile;
    return map.classes[bits];
  }
  // By all threads of the block.
  CUTE_DEVICE void share_seen() const {
    int const steps = tile.steps, words = (steps + 31) / 32;
    int const lane = Arch::thread() % 32;
    CUTE_NO_UNROLL
    for (int word = Arch::thread() / 32; word < words && steps <= Params::kMostSteps;
         word += Config::kThreads / 32) {
      bool is_seen = false;
      if (word * 32 + lane < steps) {
        BiasSteps<Config> at(params, tile);
        at.number = word * 32 + lane - 1;
        at.advance(params);
        CUTE_NO_UNROLL
        for (int i = 0; i < 4; ++i) {
          int64_t bits;
          is_seen |= class_of(at.batch, at.head, at.query + i % 2 * 64,
                              tile.first_key + i / 2 * 64, bits) != TileClass::kEmpty;
        }
      }
      uint32_t const seen = Arch::ballot(is_seen);
      if (lane == 0) shared.seen[word] = seen;
    }
  }
  // From `at` on.
  CUTE_DEVICE void skip_unseen(BiasSteps<Config>& at) const {
    if constexpr (Config::kHasMask) {
      if (tile.steps > Params::kMostSteps) return;
      while (at.number < tile.steps && !(shared.seen[at.number / 32] >> at.number % 32 & 1)) {
        at.advance(params);
      }
    }
  }

  // --- The warp that copies ----------------------------------------------------------------------

  struct alignas(16) Stats {  // of two queries
    float of[4];
  };

  CUTE_DEVICE void copy() const {
    int const lane = Arch::thread();
    if (tile.steps == 0) return;
    if (Arch::elect()) copy_bias();
    Ring<Config::kSlots> ring;
    Ring<Config::kStats> stats_ring;
    BiasSteps<Config> at(params, tile);
    skip_unseen(at);
    CUTE_NO_UNROLL
    while (at.number < tile.steps) {
      int const kv = at.head / params.heads_per_kv;
      Stats const stats[2] = {stats_of(at, 0, lane), stats_of(at, 1, lane)};
      Arch::barrier_wait(&shared.empty[ring.stage], ring.round ^ 1);
      auto* const to = reinterpret_cast<Stats*>(shared.stats[stats_ring.stage]);
      to[lane] = stats[0], to[32 + lane] = stats[1];
      Arch::sync_warp();
      if (Arch::elect()) copy_pair(ring.stage, params.k, kv, params.q, at);
      ring.advance();
      stats_ring.advance();
      Arch::barrier_wait(&shared.empty[ring.stage], ring.round ^ 1);
      if (Arch::elect()) copy_pair(ring.stage, params.v, kv, params.grad_o, at);
      ring.advance();
      at.advance(params);
      skip_unseen(at);
    }
  }

  CUTE_DEVICE void copy_bias() const {
    Arch::barrier_expect(&shared.bias_full, Config::kGroups * TileBias::kBytes);
    CUTE_UNROLL
    for (int i = 0; i < Config::kGroups * kM / 64; ++i) {
      int const group = i % Config::kGroups, rows = i / Config::kGroups * 64;
      Arch::tma_load(shared.bias[group] + rows * TileBias::kRowBytes, params.bias,
                     &shared.bias_full, tile.first_key + group * 64, 0, tile.first_query + rows,
                     tile.head, tile.batch);
    }
  }

  // Tiles of keys and of queries.
  CUTE_DEVICE void copy_pair(int slot, DenseRows const& keys, int kv, DenseRows const& queries,
                             BiasSteps<Config> const& at) const {
    arch::Barrier* const full = &shared.full[slot];
    Arch::barrier_expect(full, 2 * Tile::kBytes);
    SequenceRows const of = {at.batch, 0, 0};
    copy_boxes<Tile, Arch>(keys, shared.tiles[slot][0], full, tile.first_key, kv, of);
    copy_boxes<Tile, Arch>(queries, shared.tiles[slot][1], full, at.query, at.head, of);
  }

  // This lane's two of 64 queries: those of the tile, or the next 64.
  CUTE_DEVICE Stats stats_of(BiasSteps<Config> const& at, int half, int lane) const {
    int const query = at.query + half * 64;
    if (query >= lens.q) return {{-kInf, 0.0f, -kInf, 0.0f}};
    int64_t const number =
        params.queries.template number<64, false>(p.seq_q, {at.batch, at.head, query});
    return reinterpret_cast<Stats const*>(params.stats + number * 128)[lane];
  }

  // --- The warpgroups that compute ---------------------------------------------------------------

  CUTE_DEVICE static int thread() {
    return opaque(Arch::thread()) - Config::kFirstKeysGroup * Config::kGroupThreads;
  }

  CUTE_DEVICE void compute(int group) const {
    Scores const scores{p, score_in_log2<Score>(p, lens), score_in_log2<Score>(p, lens).log2_scale(),
                        shared.dropout};
    Ring<Config::kSlots> ring;
    Ring<Config::kStats> stats_ring;
    Slice sum;
    clear(sum);
    if (tile.steps > 0) Arch::barrier_wait(&shared.bias_full, 0);
    BiasSteps<Config> at(params, tile);
    skip_unseen(at);
    CUTE_NO_UNROLL
    while (at.number < tile.steps) {
      add_step(group, scores, at, ring, shared.stats[stats_ring.stage], sum);
      stats_ring.advance();
      at.advance(params);
      skip_unseen(at);
    }
    Arch::sync(1, Config::kComputeThreads);  // all of `copies` is free
    share(sum);
    Arch::sync(1, Config::kComputeThreads);
    store();
  }

  CUTE_DEVICE void add_step(int group, Scores const& scores, BiasSteps<Config> const& at,
                            Ring<Config::kSlots>& ring, float const (&stats_of_step)[kM][2],
                            Slice& sum) const {
    int const thread = BiasGrad::thread(), lane = thread % 32;
    Address const stats = Arch::smem_address(stats_of_step);
    Bits const bits = load_bits(at, group, thread);
    Slice x, dp;
    Arch::barrier_wait(&shared.full[ring.stage], ring.round);
    issue(group, ring.stage, x);
    int const first = ring.stage;
    ring.advance();
    Arch::barrier_wait(&shared.full[ring.stage], ring.round);
    issue(group, ring.stage, dp);
    Arch::template wgmma_wait<1>(x.x);
    arrive<Arch>(&shared.empty[first]);

    sm80::StepPlace const place{at.batch, at.head, tile.first_key + thread / 32 * Config::kWarpKeys,
                                at.query};
    typename Products::Packed words;
    typename Scores::Given given;
    Extra const extra{*this, bits, place, thread};
    scores.weights(x, place, lens, 0, {}, stats, {}, false, lane, words, given, extra);
    Arch::template wgmma_wait<0>(dp.x);
    arrive<Arch>(&shared.empty[ring.stage]);
    if constexpr (Score::kIsLinear) {
      scores.softmax_grad(dp, given.products, stats, lane);
    } else {
      scores.softmax_grad(dp, given.logits, stats, lane);
    }
    CUTE_UNROLL
    for (int i = 0; i < Slice::kSize; ++i) sum.x[i] += dp.x[i];
    ring.advance();
  }

  // x = (K or V) (Q or dO)^T, of a warpgroup's keys.
  CUTE_DEVICE void issue(int group, int slot, Slice& x) const {
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

  struct Bits {  // of this thread's 64 queries, and of the next 64
    uint32_t of[2];
  };
  CUTE_DEVICE Bits load_bits(BiasSteps<Config> const& at, int group, int thread) const {
    Bits bits = {{~0u, ~0u}};
    if constexpr (Config::kHasMask) {
      int const key = tile.first_key + group * 64;
      int const of_map = key / 64 % Main::kGroups * Config::kGroupThreads;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int64_t number;
        TileClass const found = class_of(at.batch, at.head, at.query + half * 64, key, number);
        if (found == TileClass::kEmpty) bits.of[half] = 0;
        if (found == TileClass::kPartial) {
          bits.of[half] = params.map.bits[number * Main::kComputeThreads + of_map +
                                          thread % Config::kGroupThreads];
        }
      }
    }
    return bits;
  }

  // What BackwardScores leaves to this kernel.
  struct Extra {
    BiasGrad const& of;
    Bits const bits;
    sm80::StepPlace const& place;
    int const thread;

    // And applies the mask of a kernel without a map.
    CUTE_DEVICE void add_bias(Score const& score, Slice& x) const {
      add_tile_bias<TileBias, Arch, Element>(of.shared.bias[thread / Config::kGroupThreads], thread,
                                             score, x);
      if constexpr (!Config::kHasMask) {
        int const last = place.first_key + Config::kWarpKeys - 1;
        bool const sees_all = last < of.lens.k && of.mask.q_lo(last) <= place.first_query &&
                              of.mask.q_hi(place.first_key) >= place.first_query + kM;
        unpredicated_if(!sees_all, [&] { apply_interval(x); });
      }
    }
    CUTE_DEVICE void apply_interval(Slice& x) const {
      int const lane = opaque(thread) % 32;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const key = place.first_key + half * 8 + lane / 4;
        int const first = place.first_query + lane % 4 * 2;
        bool const is_key = key < of.lens.k;
        int const begin = of.mask.q_lo(key) - first;
        int const end = is_key ? of.mask.q_hi(key) - first : begin;
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
    CUTE_DEVICE void keep(int, typename Scores::Given const&) const {}
  };

  // --- The sum -----------------------------------------------------------------------------------

  // To shared memory, as (query, key).
  CUTE_DEVICE void share(Slice const& sum) const {
    int const thread = BiasGrad::thread(), lane = thread % 32;
    CUTE_UNROLL
    for (int n = 0; n < kM / 8; ++n) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const key = thread / 32 * Config::kWarpKeys + i / 2 * 8 + lane / 4;
        whole.sum.sum[n * 8 + lane % 4 * 2 + i % 2][key] = sum(i, 0, n);
      }
    }
  }

  CUTE_DEVICE void store() const {
    PerLogit const& to = params.grad.bias;
    auto* const of_head = static_cast<float*>(const_cast<void*>(to.data)) +
                          tile.batch * to.batch_stride + tile.head * to.head_stride;
    int const thread = BiasGrad::thread();
    int const column = thread % Config::kBlockN, key = tile.first_key + column;
    if (key >= lens.k) return;
    if (to.row_stride == 0) {
      if (thread >= Config::kBlockN) return;
      float all = 0.0f;
      for (int row = 0; row < kM; ++row) all += whole.sum.sum[row][column];
      of_head[key * to.key_stride] = all;
      return;
    }
    CUTE_NO_UNROLL
    for (int row = thread / Config::kBlockN; row < kM;
         row += Config::kComputeThreads / Config::kBlockN) {
      int const query = tile.first_query + row;
      if (query >= lens.q) return;
      of_head[query * to.row_stride + key * to.key_stride] = whole.sum.sum[row][column];
    }
  }
};

}  // namespace cutlass_attn::sm90
