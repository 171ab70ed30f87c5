// A consumer warpgroup in 8 bits: 64 rows of one tile after the other, 64 keys at a time.
//
//   tensor cores   Q K(j)   P' V(j-1)          Q K(j+1)   P' V(j)
//   the rest                softmax(j)         O += P' V(j-1), P'(j)    softmax(j+1)
//
// P' is P of 64 keys rounded to e4m3 relative to its sum (quantized/fp8_weights.hpp). Its products
// with V have accumulators of their own, which are added to O in fp32 with the factors of the rows.
// If O leaves too few registers for all columns, P' V is multiplied 64 columns at a time.
//
// S stays in registers until its weights are known to be small enough (tile/softmax_rows.hpp), so a
// row max is updated without another Q K^T. Keys go from last to first, as in 16 bits.
#pragma once

#include "arch/wgmma.hpp"
#include "quantized/fp8_weights.hpp"
#include "quantized/queries.hpp"
#include "sm90/consumer_buffers.hpp"
#include "sm90/quantized/config.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct QuantizedConsumer : ConsumerBuffers<Config, Arch> {
  using Buffers = ConsumerBuffers<Config, Arch>;
  using Buffers::group, Buffers::k, Buffers::shared, Buffers::v;
  using Buffers::release, Buffers::release_k, Buffers::release_v, Buffers::thread;
  using Info = typename Config::TileInfo;
  using Steps = typename Config::Steps;
  using Step = Products<Steps, Score, Arch>;
  using Queries = QuantizedQueries<Steps, Score, Arch>;
  using Weights = Fp8Weights<Steps, Score, Arch>;
  using Units = SumUnits<Steps::kRows>;
  using Scores = FragmentScores<Arch, Score, typename Config::Place, Steps::kRows, false,
                                typename Config::Coord>;
  static constexpr int kRows = Steps::kRows, kKeys = Steps::kBlockN, kN = Config::kBlockN;
  static constexpr int kPvColumns = Steps::kPvColumns;
  static constexpr float kMinRowMax = -3e38f;  // replaces -inf once a row has seen a key block
  // Whether int32 sums go to softmax unconverted.
  static constexpr bool kKeepsSums = Score::kIsIdentity;
  // Whether q_scale stays in registers. With three warpgroups it would be in local memory.
  static constexpr bool kKeepsQScale = Config::kGroups < 3;

  typename Config::Params const& params;
  Score const score;
  float const log2_scale;
  float q_scale[kRows];  // times log2_scale if kKeepsSums
  typename Scores::Rows score_rows;
  SoftmaxRows<Arch, kRows> softmax;
  uint32_t acc_s[Step::S::kSize];
  float acc_pv[kPvColumns / 2];
  typename Step::O acc_o;
  typename Weights::P p;
  float factors[kRows];  // of P' V in flight

  CUTE_DEVICE QuantizedConsumer(typename Config::Params const& params,
                                typename Config::SharedStorage& shared, int group)
      : Buffers(shared, group),
        params(params),
        score(params.problem),
        log2_scale(score.log2_scale()) {}

  CUTE_DEVICE void run() {
    Info* info = Buffers::take();
    while (info->exists) {
      begin_rows(*info);
      Buffers::skip(Buffers::leading(*info));
      steps(*info);
      Buffers::skip(Buffers::trailing(*info));
      store(*info);
      Arch::sync_warp();
      release(&shared.info_empty[Buffers::info_stage()]);
      info = Buffers::take();
    }
  }

 private:
  // Rounds Q, and writes it back.
  CUTE_DEVICE void begin_rows(Info const& info) {
    auto const head = params.head_of(info.tile.seq, info.tile.head_kv);
    Buffers::wait_for_q();
    int const own = thread() % Config::kGroupThreads;
    auto const rows = Step::q_rows(Arch::smem_address(q_buffer()), own / 32, own % 32);
    typename Step::Q q;
    Queries::load(rows, q, q_scale);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      if constexpr (kKeepsSums) q_scale[i] *= log2_scale;
      if (!kKeepsQScale && own % 4 == 0) of_row(shared.q_scale, i) = q_scale[i];
    }
    unpredicated_if(needs_q_shift(), [&] {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const sum = Queries::dot(rows, i, params.shift_of(head), params.columns);
        if (own % 4 == 0) of_row(shared.q_shift, i) = sum;
      }
    });
    Arch::sync_warp();  // all lanes have read Q; the quad's q_scale and q_shift are full
    struct {
      char* q8;
    } const place{q_buffer()};  // a warp overwrites its own rows
    Step::store_q8(q, place, typename Steps::Place{own});
    Arch::fence_proxy_async();
    Arch::sync(1 + group, Config::kGroupThreads);  // Q in int8 full
    score_rows = scores_of(info).rows();
    softmax = SoftmaxRows<Arch, kRows>();
    clear(acc_o);
  }

  // Key blocks from last to first, those of full tiles two at a time.
  CUTE_DEVICE void steps(Info const& info) {
    TileRange const range = info.ranges[group];
    int key = range.end - kN;
    // A warpgroup whose rows see only the first half of their last tile skips the second half.
    if (info.is_half[group]) {
      first(info, key, First{});
    } else {
      first(info, key + kKeys, Second{});
      step(info, key, First{}, std::false_type{});
    }
    CUTE_NO_UNROLL
    for (key -= kN; key >= range.begin; key -= kN) {
      if (range.is_full(key)) {
        step(info, key + kKeys, Second{}, std::true_type{});
        step(info, key, First{}, std::true_type{});
      } else {
        step(info, key + kKeys, Second{}, std::false_type{});
        step(info, key, First{}, std::false_type{});
      }
    }
    issue_pv<0>(First{});
    finish_pv(First{});
  }

  template <class Half>
  CUTE_DEVICE void first(Info const& info, int key, Half half) {
    Arch::mbarrier_wait(&shared.k_full[k.stage], k.round);
    issue_qk(half);
    Scales const scales = scales_of(half);
    Arch::template wgmma_wait<0>(acc_s);
    finish_qk(half);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) factors[i] = 0.0f;  // no P' V is in flight
    softmax_weights(info, key, scales, std::false_type{}, [] {});
    Arch::mbarrier_wait(&shared.v_full[v.stage], v.round);
  }

  // Q K^T and softmax of a key block, overlapped with P' V of the previous key block, which is the
  // other half of a tile. is_full: no key is masked.
  template <class Half, class IsFull>
  CUTE_DEVICE void step(Info const& info, int key, Half half, IsFull is_full) {
    issue_qk(half);
    issue_pv<0>(other(half));
    Scales const scales = scales_of(half);
    Arch::template wgmma_wait<1>(acc_s);
    finish_qk(half);
    softmax_weights(info, key, scales, is_full, [&] { finish_pv(other(half)); });
  }

  // Halves of a tile: its key blocks. The second half is processed first.
  using First = std::integral_constant<int, 0>;
  using Second = std::integral_constant<int, 1>;
  CUTE_DEVICE static Second other(First) { return {}; }
  CUTE_DEVICE static First other(Second) { return {}; }

  // --- Softmax -----------------------------------------------------------------------------------

  // Scales of this thread's keys in a key block, of its values, and of its rows.
  struct Scales {
    float k, v, q[kRows];
  };
  // Those of half of a tile, whose K is full. Read before the wait for its products, after which a
  // warp releases K.
  template <class Half>
  CUTE_DEVICE Scales scales_of(Half half) const {
    using Address = typename Arch::SmemAddress;
    constexpr int kBytes = sizeof(quantize::KeyFp8LaneScales);
    constexpr int kOfLane = sizeof(quantize::KeyFp8LaneScales::OfLane);
    auto const tile = Arch::smem_address(shared.k[k.stage]);
    int const lane = uint32_t(opaque(Arch::thread())) % 4;
    float pair[2];
    Arch::load_shared(tile + Address(Config::TileK::kBytes + half * kBytes + lane * kOfLane), pair);
    Scales scales = {pair[0], pair[1], {}};
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      scales.q[i] = kKeepsQScale ? q_scale[i] : of_row(shared.q_scale, i);
    }
    return scales;
  }

  // Computes P' of a key block from S, and the factors of P' V. finish_before() adds P' V of the
  // previous key block to O.
  template <class IsFull, class FinishBefore>
  CUTE_DEVICE void softmax_weights(Info const& info, int key, Scales const& scales, IsFull is_full,
                                   FinishBefore&& finish_before) {
    typename Step::S acc;
    CUTE_UNROLL
    for (int i = 0; i < acc.kSize; ++i) acc.x[i] = bits_float(acc_s[i] + quantize::kMagicBits);
    auto const s = as_rows(acc);
    if constexpr (kKeepsSums) {
      Units units;
      constexpr float kMinFactor = 0x1p-126f;  // a scale may be 0, and 0 times -inf is NaN
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) units.factors[i] = fmaf(scales.q[i], scales.k, kMinFactor);
      if constexpr (!is_full) units.move_nan(s);
      scores_of(info).apply(s, key, is_full, score_rows);
      softmax_weights(s, units, scales.v, is_full, finish_before);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float const factor = scales.q[i] * scales.k, shift = of_row(shared.q_shift, i);
        CUTE_UNROLL
        for (int j = 0; j < columns_of<decltype(s)>; ++j) {
          s(i, j) = fmaf(s(i, j) - quantize::kMagic, factor, shift);
        }
      }
      scores_of(info).apply(s, key, is_full, score_rows);
      softmax_weights(s, ScaledUnits{log2_scale}, scales.v, is_full, finish_before);
    }
  }

  template <class S, class AnyUnits, class IsFull, class FinishBefore>
  CUTE_DEVICE void softmax_weights(S const& s, AnyUnits const& units, float v_scale, IsFull is_full,
                                   FinishBefore&& finish_before) {
    quantize::KeyFp8Scales of_values = {};
    typename Weights::W w;
    typename Weights::OfThread of_thread;
    // Computes the weights once, or, if the row max has to be updated (almost never), twice.
    // opaque: a loop whose count the compiler cannot know keeps one copy of the body.
    CUTE_NO_UNROLL
    for (int updates = opaque(0);; ++updates) {
      float row_max[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row_max[i] = softmax.rows[i].max;
      Weights::softmax_weights(s, row_max, units, of_values, is_full, 0, w, of_thread);
      if (!Arch::any(!Weights::are_small(of_thread.sums)) || updates > 0) break;
      update_row_max(s, units, of_thread.sums);
    }
    of_values.v = v_scale;
    finish_before();
    Weights::round(w, of_thread, softmax, of_values, p, factors);
  }

  // Updates the row max of rows with weights that are too large. Rescales O, and the factors of the
  // P' V in flight.
  template <class S, class AnyUnits>
  CUTE_DEVICE void update_row_max(S const& s, AnyUnits const& units,
                                  typename Weights::Sums const& sums) {
    int const large = opaque(Weights::large_rows(sums));
    float max[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) max[i] = softmax.max_of_quad(s, i, units);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      // Other rows keep their row max: their results must not depend on this row.
      unpredicated_if(large >> i & 1, [&] {
        float const factor = softmax.rows[i].update_max(max[i], 1.0f);
        softmax.scale(as_rows(acc_o), i, factor);
        factors[i] *= factor;
      });
      // For a row that has seen no visible key yet: -inf minus a row max of -inf would be NaN.
      softmax.rows[i].max = fmaxf(softmax.rows[i].max, kMinRowMax);
    }
    Arch::sync_warp();  // quads have diverged
  }

  CUTE_DEVICE Scores scores_of(Info const& info) const {
    return {params.problem,     score,        typename Config::Place{thread()}, info.tile,
            info.ranges[group], info.interval};
  }

  // Entry of an array for row i of this thread.
  using OfQuads = typename Config::SharedStorage::OfQuads;
  CUTE_DEVICE static float& of_row(OfQuads& quads, int i) {
    return quads[uint32_t(opaque(Arch::thread())) / 4][i];
  }
  // Whether logits need Q . shift. If int32 sums go to softmax, only the LSE and sinks need it.
  CUTE_DEVICE bool needs_q_shift() const {
    return !kKeepsSums || params.problem.softmax_lse || params.problem.logits.sinks;
  }

  // --- Products ----------------------------------------------------------------------------------

  CUTE_DEVICE char* q_buffer() const { return shared.q[Buffers::q_stage()][group]; }
  CUTE_DEVICE void release_q() { release(&shared.q_empty[Buffers::q_stage()][group]); }
  // S of a key block. K is full since the tile's second half, or since first().
  template <class Half>
  CUTE_DEVICE void issue_qk(Half half) {
    constexpr int kHalfBytes = kKeys * Config::TileK::kRowBytes;
    if constexpr (half == 1) Arch::mbarrier_wait(&shared.k_full[k.stage], k.round);
    auto const rows = Arch::descriptor(shared.k[k.stage], 16, 1024) +
                      arch::MatrixDescriptor(half * (kHalfBytes / 16));
    auto const q8 = Arch::descriptor(q_buffer(), 16, 1024);
    Arch::wgmma_fence(acc_s);
    CUTE_UNROLL
    for (int i = 0; i < Step::kSteps; ++i) {
      Arch::wgmma_int8(acc_s, q8 + column_step<typename Steps::TileQ8>(i),
                       rows + column_step<typename Config::TileK>(i), i != 0);
    }
    Arch::wgmma_commit();
  }
  // Called after the wait for issue_qk().
  template <class Half>
  CUTE_DEVICE void finish_qk(Half half) {
    if constexpr (half == 1) return;  // the other half of the tile still reads K
    k.advance();
    release_k();
  }

  // P' V of a key block, for the columns from kFirst on. V is full since the tile's second half, or
  // since first().
  template <int kFirst, class Half>
  CUTE_DEVICE void issue_pv(Half half) {
    constexpr int kHalfBytes = kKeys, kStepBytes = 32;  // one byte a key
    if constexpr (half == 1 && kFirst == 0) {
      Arch::mbarrier_wait(&shared.v_full[v.stage], v.round);
    }
    auto const columns = Arch::descriptor(shared.v[v.stage] + kFirst * 128, 16, 1024) +
                         arch::MatrixDescriptor(half * (kHalfBytes / 16));
    Arch::wgmma_fence(acc_pv, p);
    CUTE_UNROLL
    for (int i = 0; i < Weights::kSteps; ++i) {
      Arch::wgmma_e4m3(acc_pv, p[i][0], columns + i * (kStepBytes / 16), i != 0);
    }
    Arch::wgmma_commit();
  }
  // Adds P' V to O, after issue_pv<0>().
  template <int kFirst = 0, class Half>
  CUTE_DEVICE void finish_pv(Half half) {
    Arch::template wgmma_wait<0>(acc_pv, p);
    CUTE_UNROLL
    for (int i = 0; i < kPvColumns / 2; ++i) {
      float& o = acc_o.x[kFirst / 2 + i];
      o = fmaf(acc_pv[i], factors[i / 2 % 2], o);
    }
    if constexpr (kFirst + kPvColumns < Steps::kHeadDimV) {
      issue_pv<kFirst + kPvColumns>(half);
      finish_pv<kFirst + kPvColumns>(half);
    } else if constexpr (half == 0) {
      v.advance();
      release_v();
    }
  }

  // --- Output ------------------------------------------------------------------------------------

  CUTE_DEVICE void store(Info const& info) {
    Arch::sync_warp();  // products of all lanes are done with Q
    release_q();
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float& max = softmax.rows[i].max;
      if (max <= kMinRowMax) max = -kInf;
      // Q . shift, which all logits of the row lack.
      bool const adds_shift = kKeepsSums && max != -kInf && needs_q_shift();
      if (adds_shift) max = fmaf(of_row(shared.q_shift, i), log2_scale, max);
    }
    Buffers::store_rows(params.problem, info.tile, softmax, as_rows(acc_o), 1.0f);
  }
};

}  // namespace cutlass_attn::sm90
