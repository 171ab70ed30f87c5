// A consumer warpgroup: processes 64 rows of one tile after the other.
//
// Softmax of a key tile overlaps products of the neighbouring key tiles. With two stages of Q this
// continues across tiles of rows:
//
//   tensor cores   Q K(j)  P V(j-1)            Q K(j+1)  P V(j)
//   the rest               softmax(j)                    softmax(j+1)
//
//   at the end     Q K(n-1)  P V(n-2)          Q' K'(0)  P V(n-1)               Q' K'(1) ...
//                            softmax(n-1)                softmax'(0)   store O
//
// Keys go from last to first. Under a causal mask the partial tile then comes first, where the row
// max has to be found in any case.
#pragma once

#include "sm90/consumer_buffers.hpp"
#include "tile/dropout.hpp"
#include "tile/products.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct Consumer : ConsumerBuffers<Config, Arch> {
  using Buffers = ConsumerBuffers<Config, Arch>;
  using Buffers::group, Buffers::k, Buffers::shared, Buffers::taken, Buffers::v;
  using Buffers::info_stage, Buffers::k_stage, Buffers::leading, Buffers::q_stage;
  using Buffers::release, Buffers::release_k, Buffers::release_v, Buffers::skip, Buffers::skip_k;
  using Buffers::skip_v, Buffers::take, Buffers::thread, Buffers::trailing;
  using Element = typename Config::Element;
  using Shared = typename Config::SharedStorage;
  using Info = typename Config::TileInfo;
  using Place = typename Config::Place;
  using Tiles = typename Config::Tiles;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using Step = Products<Config, Score, Arch>;
  using Softmax = SoftmaxRows<Arch, Config::kRows, 4096, Score::kKeepsMaxLogit>;
  using Scores = FragmentScores<Arch, Score, Place, Config::kRows, false, typename Config::Coord>;
  static constexpr int kN = Config::kBlockN;
  // Most key tiles that a warpgroup may skip between two of its own and still overlap P V of the
  // first with Q K^T of the second. Limited by the stages of V.
  static constexpr int kMaxSkipped = 1;
  // Whether the exponentials of a full tile come before the wait for P V in any case. A wait in the
  // same block of code ptxas moves ahead of most of them. On an H200 that takes, causal: with ALiBi
  // 0.93 of the time at D = 128, 1.00 at 64 and 256; with the largest logit 1.05 at 64; plain 1.13
  // to 1.27 at 64 and 128.
  static constexpr bool kWaitsLast = Config::kHeadDim > 64 && (Score::kIsLine || Score::kIsCapped);
  // Whether the vote on these sums comes after that wait. On an H200 that takes 0.98 to 0.99 of the
  // time at D = 128, and 1.03 with a bias at 64.
  static constexpr bool kVotesLast = Config::kHeadDim > 64 && !kWaitsLast;
  // Coefficients of a softcap's polynomial. Four where instructions or registers are few.
  static constexpr int kPowers = Config::kHeadDim > 64 && !Score::kKeepsMaxLogit ? 5 : 4;
  // With one stage of Q, the next Q arrives too late to overlap tiles of rows.
  static constexpr bool kOverlapsTiles = Config::kQStages > 1;

  typename Config::Params const& params;
  Score const score;
  float const log2_scale;
  bool accumulates = false;  // whether O already holds a product
  Softmax softmax;
  typename Scores::Rows score_rows;
  typename Step::S acc_s[1];  // of a key tile
  typename Step::O acc_o;
  typename Step::P p;
  uint32_t bits[Config::kRows];  // mask bits of a key tile, as in MaskMap

  CUTE_DEVICE Consumer(typename Config::Params const& params, Shared& shared, int group)
      : Buffers(shared, group),
        params(params),
        score(params.forward.problem),
        log2_scale(score.log2_scale()) {}

  CUTE_DEVICE void run() {
    Info* info = take();
    while (info->exists) {
      start(*info);
      bool overlaps = true;
      while (overlaps) {
        steps(*info);
        release(&shared.q_empty[q_stage()][group]);
        int const stage = info_stage();
        Info* next = nullptr;
        int skipped = trailing(*info);
        // The producer publishes the next tile after it has copied all keys of this one. It cannot
        // do that before this warpgroup has released the tiles that it skips.
        if (kOverlapsTiles && skipped <= kMaxSkipped) {
          next = take();
          if (next->exists) skipped += leading(*next);
        }
        overlaps = next != nullptr && next->exists && skipped <= kMaxSkipped;
        Softmax done = softmax;
        if (overlaps) {
          start_overlapped(*next, skipped);
        } else {
          finish_products();
          skip(trailing(*info));
        }
        store(*info, done);
        Arch::sync_warp();
        release(&shared.info_empty[stage]);
        info = next != nullptr ? next : take();
      }
    }
  }

 private:
  // First key tile of a tile of rows, without a product to overlap.
  CUTE_DEVICE void start(Info const& info) {
    skip(leading(info));
    issue_qk_of_next();
    if constexpr (Config::kHasMask) load_bits(info, Config::start_of(info, group));
    Arch::template wgmma_wait<0>(s_registers());
    end_turn();
    begin_softmax(info);
    pack(info, Tiles::first_key(Config::start_of(info, group)));
  }

  // As start(), overlapped with the last P V of the previous tile of rows.
  CUTE_DEVICE void start_overlapped(Info const& info, int skipped) {
    for (int i = 0; i < skipped; ++i) skip_k();
    issue_qk_of_next();
    issue_pv();
    if constexpr (Config::kHasMask) load_bits(info, Config::start_of(info, group));
    Arch::template wgmma_wait<1>(s_registers());
    end_turn();
    begin_softmax(info);
    finish_pv();
    for (int i = 0; i < skipped; ++i) skip_v();
    accumulates = false;
    pack(info, Tiles::first_key(Config::start_of(info, group)));
  }

  // All key tiles after the first.
  CUTE_DEVICE void steps(Info const& info) {
    // In registers, because reads of shared memory would delay Q K^T (reading both ends of the
    // range cost 3 % of d128 4x4096 on an H200).
    Tiles tiles(Config::start_of(info, group));
    // Where logits grow towards smaller keys, as with ALiBi right of the diagonal, a lagging row
    // max is too small. The step for partial tiles finds the row max first.
    if constexpr (Score::kHasAlibi) {
      int const rising =
          score.rising_from(info.tile.seq.lens(params.forward.problem), info.tile.query(0));
      tiles.end_full(rising);
    }
    tiles.advance();
    // No step for half tiles where each step has long code for 64 logits.
    if constexpr (Config::kHalf < kN && !Score::kIsLong) {
      bool const is_half = Arch::uniform(info.is_half[group]);
      if (is_half && tiles.has_tile() && tiles.is_full()) {
        step<Config::kHalf>(info, tiles, std::true_type{});
        tiles.advance();
      }
    }
    CUTE_NO_UNROLL
    while (tiles.has_tile()) {
      if (tiles.is_full()) {
        step(info, tiles, std::true_type{});
      } else {
        step(info, tiles, std::false_type{});
      }
      if constexpr (!Tiles::kAdvancesEarly) tiles.advance();
    }
  }

  // Q K^T and softmax of a key tile, overlapped with P V of the first kKeys keys of the previous
  // tile. is_full: no key is masked, so the row max may lag.
  template <int kKeys = kN, class IsFull>
  CUTE_DEVICE void step(Info const& info, Tiles& tiles, IsFull is_full) {
    int const key = tiles.key();
    issue_qk();
    issue_pv<kKeys>();
    if constexpr (!is_full) load_bits(info, tiles);
    if constexpr (Tiles::kAdvancesEarly) tiles.advance();
    Arch::template wgmma_wait<1>(s_registers());
    auto s = as_rows(acc_s[0]);
    if constexpr (is_full) {
      bool ok;
      if constexpr (Config::kHasBias) add_bias(s);
      scores(info).template with_units<false, kPowers>(
          s, key, score_rows, [&](auto const& units) { ok = softmax.softmax_weights(s, units); });
      int repeats = 0;
      if constexpr (!kVotesLast) repeats = Arch::any(!ok);
      // A branch that waits for the sums of weights. Its body does nothing that matters. The wait
      // for P V is in no branch, as all threads of a warpgroup have to run the same one.
      if constexpr (kWaitsLast) branch_if(repeats, [&] { repeats = 2; });
      finish_pv();
      if constexpr (kVotesLast) repeats = Arch::any(!ok);
      unpredicated_if(repeats, [&] { rescale(info, key); });
      release_k();
    } else {
      apply_score(info, s, key, is_full);
      release_k();
      float factors[Config::kRows];
      softmax.softmax_weights_after_max(s, factors, log2_scale);
      finish_pv();
      bool const changes = factors[0] != 1.0f || factors[1] != 1.0f;
      unpredicated_if(Arch::any(changes), [&] {
        for (int i = 0; i < Config::kRows; ++i) softmax.scale(as_rows(acc_o), i, factors[i]);
      });
    }
    softmax.add_sums();
    pack(info, key);
  }

  // Rounds the weights of a key tile, and applies dropout.
  CUTE_DEVICE void pack(Info const& info, int key) {
    Step::pack(acc_s[0], p);
    if constexpr (Config::kDrops) {
      static_assert(kN % 32 == 0);
      Place const place{thread()};
      CUTE_UNROLL
      for (int i = 0; i < kN; i += 32) {
        DrawnRows<Arch, 1> drawn;
        drawn.draw(shared.dropout, place, info.tile, key + i);
        auto* const words = &p[i / 16];
        drawn.template drop<32>(shared.dropout, 0, words);
      }
    }
  }

  // Updates the row max and repeats softmax. Each warp recomputes S of its rows with mma.sync.
  CUTE_DEVICE void rescale(Info const& info, int key) {
    int const thread = Buffers::thread(), warp = thread / 32 % 4, lane = thread % 32;
    auto const q_rows = Step::q_rows(Arch::smem_address(shared.q[q_stage()][group]), warp, lane);
    auto const k_rows = Step::k_rows(Arch::smem_address(shared.k[k_stage()]), lane);
    Step::qk_of_tile(q_rows, k_rows, {}, acc_s);
    auto s = as_rows(acc_s[0]);
    if constexpr (Config::kHasBias) add_bias(s);
    scores(info).template with_units<true, kPowers>(s, key, score_rows, [&](auto const& units) {
      softmax.softmax_weights_rescaled(s, as_rows(acc_o), units);
    });
  }

  CUTE_DEVICE void begin_softmax(Info const& info) {
    auto const& first = Config::start_of(info, group);
    int const key = Tiles::first_key(first);
    if constexpr (!Config::kHasBias) release_k();
    score_rows = scores(info).rows();
    auto s = as_rows(acc_s[0]);
    if (!Score::kIsLong && Tiles::is_full_at(first, key)) {
      apply_score(info, s, key, std::true_type{});
    } else {
      apply_score(info, s, key, std::false_type{});
    }
    if constexpr (Config::kHasBias) release_k();
    softmax = Softmax();
    float factors[Config::kRows];  // of an O that has no product yet
    softmax.softmax_weights_after_max(s, factors, log2_scale);
    softmax.add_sums();
  }

  CUTE_DEVICE Scores scores(Info const& info) const {
    return {params.forward.problem, score,        Place{thread()}, info.tile,
            info.ranges[group],     info.interval};
  }

  // Applies score_mod and mask to a key tile.
  template <class S, class IsFull>
  CUTE_DEVICE void apply_score(Info const& info, S&& s, int key, IsFull is_full) const {
    if constexpr (Config::kHasBias) add_bias(s);
    if constexpr (Config::kHasMask) {
      scores(info).apply(s, key, std::true_type{}, score_rows);
      if constexpr (!is_full) apply_bits(s);
    } else {
      scores(info).apply(s, key, is_full, score_rows);
    }
  }

  // Loads the mask bits of the key tile issued last, while its products are computed.
  CUTE_DEVICE void load_bits(Info const& info, Tiles const& tiles) {
    if constexpr (Config::kHasMask) {
      int64_t const first = int64_t(tiles.tile) * Config::kBlockM;
      bool const is_partial = !tiles.has_no_bits() && tiles.tile < params.map.key_tiles;
      int const thread = Buffers::thread();
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        bits[i] = tiles.has_no_bits() ? ~0u : 0;
        if (!is_partial) continue;
        bits[i] = info.bits[(first + Place{thread}.row(i)) * MaskMap::kLanes + thread % 4];
      }
    }
  }
  template <class S>
  CUTE_DEVICE void apply_bits(S&& s) const {
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kN / 4; ++j) s(i, j) = bits[i] >> j & 1 ? s(i, j) : -kInf;
    }
  }

  // Adds the bias of the key tile multiplied last. ldmatrix distributes 16 x 16 entries in the
  // layout of mma.sync accumulators.
  template <class S>
  CUTE_DEVICE void add_bias(S&& s) const {
    using TileBias = typename Config::TileBias;
    int const thread = Buffers::thread(), warp = thread / 32 % 4, lane = thread % 32;
    int const first = params.shares_rows ? 0 : group * TileBias::kBytes;
    int const row = params.shares_rows ? 0 : warp * 16 + lane % 16;
    auto const tile =
        Arch::smem_address(shared.k[k_stage()]) + typename Arch::SmemAddress(TileK::kBytes + first);
    auto const rows = tile + TileBias::offset(row, lane / 16 * 8);
    CUTE_UNROLL
    for (int block = 0; block < kN / 16; ++block) {
      uint32_t words[4];  // rows g and g + 8 with the first 8 keys, then with the last 8
      Arch::ldmatrix_x4(TileBias::block(rows, 0, block), words);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        uint16_t const bits = uint16_t(words[i / 2] >> i % 2 * 16);
        float const bias = std::is_same_v<Element, cutlass::half_t> ? half_to_float(bits)
                                                                    : bfloat16_to_float(bits);
        float& x = s(i / 2 % 2, block * 4 + i / 4 * 2 + i % 2);
        x = score.with_bias(x, bias);
      }
    }
  }

  // --- Products ----------------------------------------------------------------------------------

  CUTE_DEVICE void issue_qk_of_next() {
    Buffers::wait_for_q();
    take_turn();
    issue_qk();
  }

  // Waits for this warpgroup's turn to begin a tile of rows. Warpgroups with later rows begin
  // first: under a causal mask their keys are copied first.
  CUTE_DEVICE void take_turn() {
    if (!Config::kTakesTurns || group == Config::kGroups - 1) return;
    int const round = round_of<Config::kInfos>(taken - 1);
    Arch::mbarrier_wait(&shared.has_begun[info_stage()][group + 1], round);
  }
  CUTE_DEVICE void end_turn() {
    if (Config::kTakesTurns) release(&shared.has_begun[info_stage()][group]);
  }

  CUTE_DEVICE void issue_qk() {
    Arch::mbarrier_wait(&shared.k_full[k.stage], k.round);
    auto const rows = Arch::descriptor(shared.q[q_stage()][group], 16, 1024);
    auto const tile = Arch::descriptor(shared.k[k.stage], 16, 1024);
    auto& s = s_registers();
    Arch::wgmma_fence(s);
    CUTE_UNROLL
    for (int i = 0; i < Config::kHeadDim / 16; ++i) {
      Arch::template wgmma_ss<Element>(s, rows + column_step<TileQ>(i),
                                       tile + column_step<TileK>(i), i != 0);
    }
    Arch::wgmma_commit();
    k.advance();
  }

  template <int kKeys = kN>
  CUTE_DEVICE void issue_pv() {
    Arch::mbarrier_wait(&shared.v_full[v.stage], v.round);
    auto const tile = Arch::descriptor(shared.v[v.stage], TileV::kChunkBytes, 1024);
    auto& o = o_registers();
    Arch::wgmma_fence(o, p);
    CUTE_UNROLL
    for (int i = 0; i < kKeys / 16; ++i) {
      Arch::template wgmma_rs<Element>(o, p[i][0], tile + i * 16 * TileV::kRowBytes / 16,
                                       i != 0 || accumulates);
    }
    Arch::wgmma_commit();
    accumulates = true;
    v.advance();
  }

  CUTE_DEVICE void finish_pv() {
    Arch::template wgmma_wait<0>(o_registers(), p);
    release_v();
  }

  // Last P V of a tile of rows.
  CUTE_DEVICE void finish_products() {
    issue_pv();
    finish_pv();
    accumulates = false;
  }

  CUTE_DEVICE auto& s_registers() { return acc_s[0].x; }
  CUTE_DEVICE auto& o_registers() { return acc_o.x; }

  // --- Output ------------------------------------------------------------------------------------

  CUTE_DEVICE void store(Info const& info, Softmax& done) {
    float kept_scale = 1.0f;
    if constexpr (Config::kDrops) kept_scale = shared.dropout.kept_scale;
    Buffers::store_rows(params.forward.problem, info.tile, done, as_rows(acc_o), kept_scale);
  }
};

}  // namespace cutlass_attn::sm90
