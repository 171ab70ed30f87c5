// A warpgroup that has a share of a tile's keys, and makes its part of O of them.
//
// Few keys are a chain of latencies. So a tile of keys is two halves, and the products of one, and
// of the next tile, run beside softmax of the other:
//
//   tensor cores                               P V(a) Q' K'(a)         P V(b) Q' K'(b)
//   the rest      row max of a, of b   exp(a)                  exp(b)                  ...
//
// The row max is looked for in the first tile, and later where a weight would become too large. The
// last tile has its Q K^T computed once more, for nothing: under a condition ptxas serializes
// wgmma. Where keys are few all copies are on their way before the first product.
#pragma once

#include "sm80/products.hpp"
#include "sm90/split_keys_copy.hpp"
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
  using Step = sm80::Products<Config, Score, Arch>;
  using Softmax = SoftmaxRows<Arch, Config::kRows>;
  using Scores = FragmentScores<Arch, Score, typename Config::Place, Config::kRows, false>;
  static constexpr int kHalf = Config::kHalf;

  ClusterSplitsParams const& params;
  Shared& shared;
  int const group;      // of the block
  bool const is_first;  // whether this is the first warp of the warpgroup
  Ring<Config::kKStages> k;
  Ring<Config::kVStages> v;
  Softmax softmax = {};
  typename Step::S acc_s[2];  // of the halves of a tile of keys
  typename Step::O acc_o;
  typename Step::P p[2];

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
    // The last warpgroup has its first keys last, and nothing to do until then.
    if (group == Config::kGroups - 1 && is_first && Arch::elect()) copy.fill();
    Arch::barrier_wait(&shared.q_full, 0);
    if (first >= range.end) {
      clear(acc_o);
      return;
    }
    issue_qk(0);
    issue_qk(1);
    Arch::template wgmma_wait<1>(s_registers(0));
    CUTE_NO_UNROLL
    for (int key = first; key < range.end; key += stride) {
      float largest[Config::kRows];
      apply(scores, range, key, 0);
      softmax.largest_of_thread(as_rows(acc_s[0]), largest, false_type{});
      Arch::template wgmma_wait<0>(s_registers(1));
      refill(copy, key, key != first);
      apply(scores, range, key, 1);
      softmax.largest_of_thread(as_rows(acc_s[1]), largest, true_type{});
      if (key == first) {
        softmax.start(largest, log2_scale);
      } else {
        softmax.update_max_checked(largest, as_rows(acc_o), log2_scale);
      }
      weigh(0, log2_scale);
      Arch::barrier_wait(&shared.v_full[group][v.stage], v.round);
      issue_pv(0, key != first);
      if (key + stride < range.end) k.advance();  // else once more
      issue_qk(0);
      weigh(1, log2_scale);
      issue_pv(1, true);
      issue_qk(1);
      v.advance();
      Arch::template wgmma_wait<1>(s_registers(0), o_registers(), p[0], p[1]);
    }
    softmax.complete_sums();
  }

  // K is empty.
  CUTE_DEVICE void finish() { Arch::template wgmma_wait<0>(s_registers(1)); }

  CUTE_DEVICE void sync_group() const { Arch::sync(1 + group, Config::kGroupThreads); }

 private:
  CUTE_DEVICE static int thread() { return opaque(Arch::thread()) % Config::kGroupThreads; }

  // The buffers of this tile's K and of the V before it are empty: copies the next ones into them.
  CUTE_DEVICE void refill(SplitKeysCopy<Config, Arch> const& copy, int key, bool has_v) {
    TileRange const& range = copy.range;
    int const stride = copy.stride(), next_k = key + Config::kKStages * stride;
    int const next_v = has_v ? key + (Config::kVStages - 1) * stride : range.end;
    if (next_k >= range.end && next_v >= range.end) return;
    sync_group();  // K and V empty
    if (!is_first || !Arch::elect()) return;
    copy.v(group, next_v, (v.stage == 0 ? Config::kVStages : v.stage) - 1);
    copy.k(group, next_k, k.stage);
  }

  CUTE_DEVICE void apply(Scores const& scores, TileRange const& range, int key, int half) {
    auto s = as_rows(acc_s[half]);
    if (range.is_full(key)) {
      scores.apply(s, key + half * kHalf, true_type{});
    } else {
      scores.apply(s, key + half * kHalf, false_type{});
    }
  }

  CUTE_DEVICE void weigh(int half, float log2_scale) {
    softmax.softmax_weights_of_max(as_rows(acc_s[half]), log2_scale);
    softmax.add_sums();
    Step::pack(acc_s[half], p[half]);
  }

  CUTE_DEVICE void issue_qk(int half) {
    if (half == 0) Arch::barrier_wait(&shared.k_full[group][k.stage], k.round);
    auto const rows = Arch::descriptor(shared.q, 16, 1024);
    auto const tile =
        Arch::descriptor(shared.buffers[group].k[k.stage], 16, 1024) + rows_step<TileK>(half);
    auto& s = s_registers(half);
    Arch::wgmma_fence(s);
    CUTE_UNROLL
    for (int i = 0; i < Config::kHeadDim / 16; ++i) {
      Arch::template wgmma_ss<Element>(s, rows + column_step<TileQ>(i),
                                       tile + column_step<TileK>(i), i != 0);
    }
    Arch::wgmma_commit();
  }

  CUTE_DEVICE void issue_pv(int half, bool accumulates) {
    auto const tile = Arch::descriptor(shared.buffers[group].v[v.stage], TileV::kChunkBytes, 1024) +
                      rows_step<TileV>(half);
    auto& o = o_registers();
    Arch::wgmma_fence(o, p[half]);
    CUTE_UNROLL
    for (int i = 0; i < kHalf / 16; ++i) {
      Arch::template wgmma_rs<Element>(o, p[half][i][0], tile + i * 16 * TileV::kRowBytes / 16,
                                       i != 0 || accumulates);
    }
    Arch::wgmma_commit();
  }

  // From a descriptor's first row of keys to those of a half.
  template <class Tile>
  CUTE_DEVICE static constexpr int rows_step(int half) {
    return half * kHalf * Tile::kRowBytes / 16;
  }

  using SRegisters = float[kHalf / 2];
  using ORegisters = float[Config::kHeadDimV / 2];
  CUTE_DEVICE SRegisters& s_registers(int half) {
    return reinterpret_cast<SRegisters&>(acc_s[half](0));
  }
  CUTE_DEVICE ORegisters& o_registers() { return reinterpret_cast<ORegisters&>(acc_o(0)); }
};

}  // namespace cutlass_attn::sm90
