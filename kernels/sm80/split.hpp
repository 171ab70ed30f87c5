// The split schedule of the mma.sync forward kernel: warps along N share the rows.
//
// Beyond a head_dim of 256 a warp has no registers for 16 rows of O with all head-dim columns. Here
// Config::kWarpsN warps share the rows. Warp (m, n)
//
//   computes S of rows m with share n of a tile's keys, over all of head_dim, and the weights P,
//   which it writes to shared memory for all warps (m, .);
//   adds P V to share n of the head-dim columns of O, over all keys of the tile.
//
// K and V have one stage each, and a tile has two barriers:
//
//   cp.async   V(n) ------------------+   K(n+1) ------+
//   compute    Q K(n), softmax, P ->  |   -> P, P V(n) |   Q K(n+1) ...
//           ^ K(n) landed, P empty      ^ V(n) landed, P full
//
// All warps of a row must subtract an equal row max (tile/softmax_rows.hpp), because P V combines
// their weights. A warp whose weights are too large sets a flag next to P. All warps (m, .) see it
// after the barrier that P needs anyway. Only then do they exchange the largest scores, through P's
// buffer, update the row max and write P again.
#pragma once

#include "core/opaque.hpp"
#include "sm80/operands.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct SplitSchedule {
  using Step = Products<Config, Score, Arch>;
  using Element = typename Config::Element;
  using Address = typename Arch::SmemAddress;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using TileP = typename Config::TileP;
  using Scores = typename Step::Scores;
  using Words = typename Step::Words;
  static constexpr int kRowBlocks = Config::kRowBlocks, kRows = Config::kRows;
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kN = Config::kBlockN, kKeyBlock = Step::kKeyBlock;
  static constexpr int kSteps = Step::kSteps;
  static constexpr int kStepsKept = Config::kFacts.q_steps_kept(Score::kIsGeneral);
  // Independent accumulation chains: the latency of an HMMA is five times its issue interval.
  static constexpr int kChains = 4 / kRowBlocks;
  static_assert(kChains >= 1 && kSteps % 2 == 0);

  Operands<Config, Score, Arch>& in;
  Result<Config, Score, Arch>& out;
  int const warp_m = in.scores.place.warp_m(), warp_n = in.scores.place.warp_n();
  int const lane = in.scores.place.thread % 32;
  char* const p_tile = in.shared.p(warp_m);  // of the warps that share the rows
  // ldmatrix addresses of this lane in block (0, 0): this warp's keys, its columns, P.
  Address const k_rows =
      Arch::smem_address(in.shared.k) + TileK::offset(warp_n * kKeyBlock + lane % 8, lane / 8 * 8);
  Address const v_rows = Arch::smem_address(in.shared.v) +
                         TileV::offset(lane % 16, warp_n* Config::kWarpColumns + lane / 16 * 8);
  Address const p_rows = Arch::smem_address(p_tile) + TileP::offset(lane % 16, lane / 16 * 8);
  // Offset of this thread's first pair of weights.
  int const p_first = TileP::offset(lane / 4, warp_n* kKeyBlock) + lane % 4 * 4;
  Words q[kStepsKept][kRowBlocks];

  CUTE_DEVICE SplitSchedule(Operands<Config, Score, Arch>& in, Result<Config, Score, Arch>& out)
      : in(in), out(out) {}

  CUTE_DEVICE void run() {
    in.copy_bits(0);
    in.copy.copy_k(in.first_key(), 0);
    if (lane == 0) in.shared.large_at[warp_m][warp_n] = -1;
    Arch::template cp_async_wait_group<1>();
    Arch::sync();  // Q full
    CUTE_UNROLL
    for (int k = 0; k < kStepsKept; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) Step::load_q(in.q_rows, m, k, q[k][m]);
    }
    in.for_each_tile([&](int key, auto is_full) { step(key, is_full); });
  }

  // Processes a key tile. is_full: no key of it is masked.
  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Arch::template cp_async_wait_group<0>();
    Arch::sync();  // K full; P and V empty (in the first tile Q, in V's place)
    in.copy.copy_v(key, 0);
    int const own_key = opaque(key + warp_n * kKeyBlock);
    auto const bias = in.read_bias(own_key, is_full);
    Scores acc_s;
    qk(acc_s);
    in.add_bias(as_rows(acc_s), bias);
    in.apply(as_rows(acc_s), own_key, is_full);
    in.apply_bits(as_rows(acc_s), warp_n, 0, is_full);
    Scores weights = acc_s;
    bool const ok = out.softmax.softmax_weights(as_rows(weights), in.log2_scale);
    write_p(weights, own_key);
    if (Arch::any(!ok) && lane == 0) in.shared.large_at[warp_m][warp_n] = key;
    Arch::template cp_async_wait_group<0>();
    Arch::sync();  // P and V full; K empty
    if (Arch::uniform(is_large(key))) rescale(acc_s, own_key);
    out.softmax.add_sums();
    in.look_ahead();
    in.copy_next_bits(0);
    in.copy.copy_k(in.tiles.next_key(), 0);
    pv();
  }

  // S = Q K^T for this warp's share of the keys. opaque, here and below: without it, the compiler
  // keeps the addresses of all blocks in registers through the loop, and spills.
  CUTE_DEVICE void qk(Scores& acc_s) const {
    Scores chains[kChains];
    CUTE_UNROLL
    for (int i = 0; i < kChains; ++i) clear(chains[i]);
    Words k_words;
    Address const q_here = opaque(in.q_rows), k_here = opaque(k_rows);
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      if (k % 2 == 0) Arch::ldmatrix_x4(TileK::block(k_here, 0, k), k_words);  // for 2 steps
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        Words words;
        if (k < kStepsKept) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) words[i] = q[k][m][i];
        } else {
          Step::load_q(q_here, m, k, words);
        }
        Step::multiply(words, k_words + k % 2 * 2, chains[k % kChains].block(m, 0));
      }
    }
    CUTE_UNROLL
    for (int e = 0; e < acc_s.kSize; ++e) {
      float sum = chains[0](e);
      CUTE_UNROLL
      for (int i = 1; i < kChains; ++i) sum += chains[i](e);
      acc_s(e) = sum;
    }
  }

  // Rounds the weights and stores them for the warps that share the rows.
  CUTE_DEVICE void write_p(Scores const& weights, int key) {
    typename Step::P p;
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      auto const& block = weights.block(m, 0);  // m16n8: rows g and g + 8, two columns
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        p[0][m][half] = Arch::template pack<Element>(block[2 * half], block[2 * half + 1]);
      }
    }
    typename Operands<Config, Score, Arch>::Drawn drawn;
    in.draw(key, 0, drawn);
    in.drop(key, warp_n * kKeyBlock % 32, drawn, p);
    int const first = opaque(p_first);
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(p_tile + TileP::block8(first, 2 * m + half, 0)) =
            p[0][m][half];
      }
    }
  }

  // O += P V for this warp's columns.
  CUTE_DEVICE void pv() {
    Address const p_here = opaque(p_rows), v_here = opaque(v_rows);
    CUTE_UNROLL
    for (int k = 0; k < kN / 16; ++k) {
      Words p_words[kRowBlocks];
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        Arch::ldmatrix_x4(TileP::block(p_here, m, k), p_words[m]);
      }
      CUTE_UNROLL
      for (int d = 0; d < Config::kWarpColumns / 16; ++d) {
        Words v_words;
        Step::load_v(v_here, k, d, v_words);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int m = 0; m < kRowBlocks; ++m) {
            Step::multiply(p_words[m], v_words + 2 * half, out.acc_o.block(m, 2 * d + half));
          }
        }
      }
    }
  }

  // Whether a warp of these rows found too large a weight in the tile at `key`.
  CUTE_DEVICE bool is_large(int key) const {
    bool result = false;
    CUTE_UNROLL
    for (int n = 0; n < Config::kWarpsN; ++n) {
      result |= in.shared.large_at[warp_m][n] == key;
    }
    return result;
  }

  // Barrier of the warps that share rows.
  CUTE_DEVICE void sync_rows() const { Arch::sync(1 + warp_m, 32 * Config::kWarpsN); }

  // Updates the row max and recomputes the weights, in all warps that share the rows. The weights
  // replace the scores.
  CUTE_DEVICE void rescale(Scores& acc_s, int key) {
    static_assert(sizeof(BlockMax) * Config::kWarpsN * kWarpRows <= TileP::kBytes);
    BlockMax* const exchange = reinterpret_cast<BlockMax*>(p_tile) + lane / 4;  // (warp, row)
    auto const s = as_rows(acc_s);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      BlockMax const mine = out.softmax.block_max(s, i, !out.softmax.is_small(i));
      if (lane % 4 == 0) exchange[warp_n * kWarpRows + i * 8] = mine;
    }
    sync_rows();  // exchange full
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      BlockMax all = exchange[i * 8];
      CUTE_UNROLL
      for (int n = 1; n < Config::kWarpsN; ++n) {
        BlockMax const other = exchange[n * kWarpRows + i * 8];
        all.is_too_large |= other.is_too_large;
        all.max = fmaxf(all.max, other.max);
      }
      out.softmax.weights_of_row_rescaled(s, as_rows(out.acc_o), all, i, in.log2_scale);
    }
    sync_rows();  // exchange empty
    write_p(acc_s, key);
    sync_rows();  // P full
  }
};

// Completes the sums and the largest scores of rows that several warps share. A warp has those
// of its keys, the sum relative to an equal row max. They go through shared memory, (warp along N,
// row), in K's buffer, which is empty since P of the last tile was full.
template <class Config, class Arch, class Softmax>
CUTE_DEVICE void merge_rows(typename Config::SharedStorage& shared,
                            typename Config::Place const& place, Softmax& softmax) {
  static_assert(Config::kWarpsN * Config::kBlockM * sizeof(float) <=
                Config::TileK::kBytes + Config::TileV::kBytes);
  float* const all = reinterpret_cast<float*>(&shared);
  auto const merge = [&](auto&& of_row, auto&& merged) {
    if (place.column(0) == 0) {  // one of the four threads of a warp that share a row
      CUTE_UNROLL
      for (int i = 0; i < Config::kRows; ++i) {
        all[place.warp_n() * Config::kBlockM + place.row(i)] = of_row(i);
      }
    }
    Arch::sync();  // all full
    CUTE_UNROLL
    for (int i = 0; i < Config::kRows; ++i) {
      float x = all[place.row(i)];
      CUTE_UNROLL
      for (int n = 1; n < Config::kWarpsN; ++n) {
        x = merged(x, all[n * Config::kBlockM + place.row(i)]);
      }
      of_row(i) = x;
    }
  };
  merge([&](int i) -> float& { return softmax.rows[i].sum; },
        [](float a, float b) { return a + b; });
  if constexpr (Softmax::kKeeps) {
    Arch::sync();  // all empty
    merge([&](int i) -> float& { return softmax.largest.of_row[i]; },
          [](float a, float b) { return fmaxf(a, b); });
  }
}

}  // namespace cutlass_attn::sm80
