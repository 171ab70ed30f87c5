// A warpgroup with a share of a tile's keys: computes a partial O.
//
// With few keys, the run time is a chain of latencies. So each key tile is processed in halves, and
// softmax of one half overlaps products of the other half and of the next tile:
//
//   tensor cores                               P V(a) Q' K'(a)         P V(b) Q' K'(b)
//   the rest      row max of a, of b   exp(a)                  exp(b)                  ...
//
// The row max is found in the first tile, and again if a weight would become too large. If a
// warpgroup has only two tiles and enough registers, both form one pass: four halves with one row
// max. All copies are issued before the first product.
#pragma once

#include "sm90/split_keys_copy.hpp"
#include "tile/products.hpp"
#include "tile/scores.hpp"
#include "tile/softmax_rows.hpp"

namespace cutlass_attn::sm90 {

template <class Config, class Score, class Arch>
struct SplitKeysGroup {
  using Element = typename Config::Element;
  using Shared = typename Config::SharedStorage;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using Step = Products<Config, Score, Arch>;
  using Softmax = SoftmaxRows<Arch, Config::kRows>;
  using Scores = FragmentScores<Arch, Score, typename Config::Place, Config::kRows, false>;
  static constexpr int kHalf = Config::kHalf;

  ClusterSplitsParams const& params;
  Shared& shared;
  int const group;      // index in the block
  bool const is_first;  // whether this is the first warp of the warpgroup
  Ring<Config::kKStages> k;
  Ring<Config::kVStages> v;
  Softmax softmax = {};
  typename Step::S acc_s[2 * Config::kPassTiles];  // of the halves of a pass
  typename Step::O acc_o;
  typename Step::P p[2 * Config::kPassTiles];

  CUTE_DEVICE SplitKeysGroup(ClusterSplitsParams const& params, Shared& shared, int warp)
      : params(params), shared(shared), group(warp / 4), is_first(warp % 4 == 0) {}

  CUTE_DEVICE void run() {
    TileRange const range = shared.block.range;
    Score const score(params.forward.problem);
    float const log2_scale = score.log2_scale();
    Scores const scores{
        params.forward.problem, score, {thread()}, shared.tile(), shared.block.range,
        shared.block.interval};
    SplitKeysCopy<Config, Arch> const copy{params, shared, shared.tile(), range};
    int const first = copy.first_key(group), stride = copy.stride();
    Arch::mbarrier_wait(&shared.q_full, 0);
    bool const has_two = first + stride < range.end && first + 2 * stride >= range.end;
    if (Config::kPassTiles == 2 && has_two) {
      begin_pass<Config::kPassTiles>();
      pass<Config::kPassTiles>(copy, scores, first, false, log2_scale, std::true_type{});
    } else if (first < range.end) {
      begin_pass<1>();
      int key = first;
      CUTE_NO_UNROLL
      for (; key + stride < range.end; key += stride) {
        pass<1>(copy, scores, key, key != first, log2_scale, std::false_type{});
      }
      pass<1>(copy, scores, key, key != first, log2_scale, std::true_type{});
    } else {
      clear(acc_o);
    }
    softmax.complete_sums();
  }

  CUTE_DEVICE void sync_group() const { Arch::sync(1 + group, Config::kGroupThreads); }

 private:
  CUTE_DEVICE static int thread() { return opaque(Arch::thread()) % Config::kGroupThreads; }

  // Calls visit(std::integral_constant<int, i>()) for i from 0 to kCount - 1.
  template <int kCount, int kFirst = 0, class Visit>
  CUTE_DEVICE static void for_each(Visit&& visit) {
    if constexpr (kFirst < kCount) {
      visit(std::integral_constant<int, kFirst>{});
      for_each<kCount, kFirst + 1>(visit);
    }
  }

  // Issues Q K^T of the pass and waits for S of the first half.
  template <int kTiles>
  CUTE_DEVICE void begin_pass() {
    CUTE_UNROLL
    for (int i = 0; i < 2 * kTiles; ++i) issue_qk(i);
    Arch::template wgmma_wait<2 * kTiles - 1>(s_registers(0));
  }

  // Softmax and P V of the tiles of a pass that begins at `key`. Issues Q K^T of the next pass if
  // there is one.
  template <int kTiles, class IsLast>
  CUTE_DEVICE void pass(SplitKeysCopy<Config, Arch> const& copy, Scores const& scores, int key,
                        bool accumulates, float log2_scale, IsLast is_last) {
    static_assert(is_last || kTiles == 1);
    constexpr int kHalves = 2 * kTiles;
    float largest[Config::kRows];
    for_each<kHalves>([&](auto i) {
      if constexpr (i > 0) Arch::template wgmma_wait<kHalves - 1 - i>(s_registers(i));
      apply(scores, copy.range, key + i / 2 * copy.stride(), i);
      softmax.largest_of_thread(as_rows(acc_s[i]), largest, std::bool_constant<(i > 0)>{});
    });
    if (!is_last) refill_k(copy, key);
    if (accumulates) {
      softmax.update_max_checked(largest, as_rows(acc_o), log2_scale);
    } else {
      softmax.start(largest, log2_scale);
    }
    CUTE_UNROLL
    for (int i = 0; i < kHalves; ++i) {
      softmax_of_half(i, log2_scale);
      issue_pv(i, accumulates || i > 0);
      if (!is_last) issue_qk(i);
    }
    if constexpr (is_last) {
      Arch::template wgmma_wait<0>(o_registers(), p);
    } else {
      Arch::template wgmma_wait<1>(o_registers(), p[0], p[1], s_registers(0));
      refill_v(copy, key);
    }
  }

  // Copies the next key tile into the buffer of the tile at `key`, which is empty.
  CUTE_DEVICE void refill_k(SplitKeysCopy<Config, Arch> const& copy, int key) const {
    int const next = key + Config::kKStages * copy.stride();
    if (next >= copy.range.end) return;
    sync_group();  // K empty
    if (is_first && Arch::elect()) copy.k(group, next, k.last());
  }
  CUTE_DEVICE void refill_v(SplitKeysCopy<Config, Arch> const& copy, int key) const {
    int const next = key + Config::kVStages * copy.stride();
    if (next >= copy.range.end) return;
    sync_group();  // V empty
    if (is_first && Arch::elect()) copy.v(group, next, v.last());
  }

  // Applies score_mod and mask to the i-th half, counted from the tile at `key`.
  CUTE_DEVICE void apply(Scores const& scores, TileRange const& range, int key, int i) {
    auto s = as_rows(acc_s[i]);
    if (range.is_full(key)) {
      scores.apply(s, key + i % 2 * kHalf, std::true_type{});
    } else {
      scores.apply(s, key + i % 2 * kHalf, std::false_type{});
    }
  }

  CUTE_DEVICE void softmax_of_half(int i, float log2_scale) {
    softmax.softmax_weights_of_max(as_rows(acc_s[i]), log2_scale);
    softmax.add_sums();
    Step::pack(acc_s[i], p[i]);
  }

  // Issue products of the i-th half. The first half of a tile waits for its buffer; the second half
  // advances to the next buffer.
  CUTE_DEVICE void issue_qk(int i) {
    if (i % 2 == 0) Arch::mbarrier_wait(&shared.k_full[group][k.stage], k.round);
    auto const rows = Arch::descriptor(shared.q, 16, 1024);
    auto const tile =
        Arch::descriptor(shared.buffers[group].k[k.stage], 16, 1024) + rows_step<TileK>(i % 2);
    auto& s = s_registers(i);
    Arch::wgmma_fence(s);
    CUTE_UNROLL
    for (int d = 0; d < Config::kHeadDim / 16; ++d) {
      Arch::template wgmma_ss<Element>(s, rows + column_step<TileQ>(d),
                                       tile + column_step<TileK>(d), d != 0);
    }
    Arch::wgmma_commit();
    if (i % 2 == 1) k.advance();
  }

  CUTE_DEVICE void issue_pv(int i, bool accumulates) {
    if (i % 2 == 0) Arch::mbarrier_wait(&shared.v_full[group][v.stage], v.round);
    auto const tile = Arch::descriptor(shared.buffers[group].v[v.stage], TileV::kChunkBytes, 1024) +
                      rows_step<TileV>(i % 2);
    auto& o = o_registers();
    Arch::wgmma_fence(o, p[i]);
    CUTE_UNROLL
    for (int key = 0; key < kHalf; key += 16) {
      Arch::template wgmma_rs<Element>(o, p[i][key / 16][0], tile + key * TileV::kRowBytes / 16,
                                       key != 0 || accumulates);
    }
    Arch::wgmma_commit();
    if (i % 2 == 1) v.advance();
  }

  // Offset of a half's keys in a descriptor.
  template <class Tile>
  CUTE_DEVICE static constexpr int rows_step(int half) {
    return half * kHalf * Tile::kRowBytes / 16;
  }

  CUTE_DEVICE auto& s_registers(int i) { return acc_s[i].x; }
  CUTE_DEVICE auto& o_registers() { return acc_o.x; }
};

}  // namespace cutlass_attn::sm90
