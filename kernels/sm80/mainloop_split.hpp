// The split schedule of the mma.sync forward kernel: several warps share a row.
//
// Beyond a head_dim of 256 a warp has no registers for 16 rows of O across all columns. Here
// Config::kColumnWarps warps share the rows. Warp (r, c)
//
//   computes the scores of the rows r with its share c of a tile's keys, over all of head_dim,
//   weighs them, and writes the weights P to shared memory, where all (r, .) read them back,
//   adds P V to its share c of the columns of O, over all keys of the tile.
//
// K and V have one buffer each, a tile two barriers:
//
//   cp.async   V(n) ------------------+   K(n+1) ------+
//   compute    Q K(n), weights, P ->  |   -> P, P V(n) |   Q K(n+1) ...
//           ^ K(n) landed, P free       ^ V(n) landed, P written
//
// References (cute/softmax.hpp) belong to rows: all warps of a row must weigh with the same one,
// because their weights meet in P V. A warp whose weights are too large says so beside P, and all
// (r, .) see it after the barrier that P needs anyway. Only then they exchange their largest
// scores, through the place of P, raise the references and write P anew.
#pragma once

#include "cute/fragment.hpp"
#include "cute/softmax.hpp"
#include "sm80/config_split.hpp"

namespace cutlass_attn::sm80 {

// `Loop` is the MainloopForward that has the operands, O and the softmax state.
template <class Config, class Score, class Arch, class Loop>
struct SplitSchedule {
  using Element = typename Config::Element;
  using Address = typename Arch::SmemAddress;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using TileP = typename Config::TileP;
  using Scores = typename Loop::Scores;
  using Words = typename Loop::Words;
  using Peak = typename SoftmaxRows<Arch, Loop::kRows>::Peak;
  static constexpr int kRowBlocks = Loop::kRowBlocks, kRows = Loop::kRows;
  static constexpr int kN = Config::kBlockN, kSlice = Config::kSlice;
  static constexpr int kSteps = Config::kHeadDim / 16;  // of Q K
  static constexpr int kStepsInRegisters = Config::steps_in_registers(Score::kIsGeneral);
  // Sums of products that do not wait for each other: an HMMA's result takes five times as long as
  // the next HMMA.
  static constexpr int kChains = 4 / kRowBlocks;
  static_assert(kChains >= 1 && kSteps % 2 == 0);

  Loop& loop;
  int const row_warp, column_warp, lane;
  Address q_block, k_block, v_block, p_block;  // this lane's row of block (0, 0), for ldmatrix
  char* const p_tile;                          // of the warps that share the rows
  int p_first;  // where in it this thread's first pair of weights goes
  Words q_words[kRowBlocks * kStepsInRegisters];

  CUTE_DEVICE explicit SplitSchedule(Loop& loop_)
      : loop(loop_),
        row_warp(loop_.row_warp()),
        column_warp(loop_.column_warp()),
        lane(loop_.thread % 32),
        p_tile(loop_.shared.p(row_warp)) {
    Address const k = Arch::smem_address(loop.shared.k);
    Address const v = Arch::smem_address(loop.shared.v);
    Address const q = Arch::smem_address(&loop.shared) + Config::kQueriesAt;
    q_block = q + TileQ::offset(row_warp * 16 + lane % 16, lane / 16 * 8);
    k_block = k + TileK::offset(column_warp * kSlice + lane % 8, lane / 8 * 8);
    v_block = v + TileV::offset(lane % 16, column_warp * Config::kWarpColumns + lane / 16 * 8);
    p_block = Arch::smem_address(p_tile) + TileP::offset(lane % 16, lane / 16 * 8);
    p_first = TileP::offset(lane / 4, column_warp * kSlice) + lane % 4 * 4;
  }

  // x as a number of its own: what is computed from it is computed in every tile. Otherwise the
  // compiler keeps it in registers through the loop, and spills for it.
  template <class T>
  CUTE_DEVICE static T anew(T x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  // Barrier of the warps that share rows.
  CUTE_DEVICE void sync_row_warps() const { Arch::sync(1 + row_warp, 32 * Config::kColumnWarps); }

  CUTE_DEVICE static void load_q(Address q_block, int m, int k, Words& words) {
    Arch::load_matrix(TileQ::block(q_block, m * Config::kWarps, k), words);
  }

  // S = Q K^T for this warp's share of the keys.
  CUTE_DEVICE void product_qk(Scores& acc_s) const {
    Scores chains[kChains];
    CUTE_UNROLL
    for (int i = 0; i < kChains; ++i) clear(chains[i]);
    Words k_words;
    Address const q_here = anew(q_block), k_here = anew(k_block);
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      if (k % 2 == 0) Arch::load_matrix(TileK::block(k_here, 0, k), k_words);  // for 2 steps
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        Words q;
        if (k < kStepsInRegisters) {
          CUTE_UNROLL
          for (int i = 0; i < 4; ++i) q[i] = q_words[k * kRowBlocks + m][i];
        } else {
          load_q(q_here, m, k, q);
        }
        loop.multiply(q, k_words + k % 2 * 2, chains[k % kChains](_, m, 0));
      }
    }
    CUTE_UNROLL
    for (int e = 0; e < size(acc_s); ++e) {
      float sum = chains[0](e);
      CUTE_UNROLL
      for (int i = 1; i < kChains; ++i) sum += chains[i](e);
      acc_s(e) = sum;
    }
  }

  // Writes the weights, rounded, where the warps that share the rows read them.
  CUTE_DEVICE void publish(Scores const& weights) {
    int const first = anew(p_first);
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      auto const block = weights(_, m, 0);  // m16n8: rows g and g + 8, two columns
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(p_tile + TileP::block8(first, 2 * m + half, 0)) =
            Arch::template pack<Element>(block(2 * half), block(2 * half + 1));
      }
    }
  }

  // O += P V for this warp's columns.
  CUTE_DEVICE void product_pv() {
    Address const p_here = anew(p_block), v_here = anew(v_block);
    CUTE_UNROLL
    for (int k = 0; k < kN / 16; ++k) {
      Words p_words[kRowBlocks];
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        Arch::load_matrix(TileP::block(p_here, m, k), p_words[m]);
      }
      CUTE_UNROLL
      for (int d = 0; d < Config::kWarpColumns / 16; ++d) {
        Words v_words;
        Arch::load_matrix_trans(TileV::block(v_here, k, d), v_words);
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          CUTE_UNROLL
          for (int m = 0; m < kRowBlocks; ++m) {
            loop.multiply(p_words[m], v_words + 2 * half, loop.acc_o(_, m, 2 * d + half));
          }
        }
      }
    }
  }

  // Whether a warp of these rows found a weight too large in the tile that begins at `key`.
  CUTE_DEVICE bool is_large(int key) const {
    bool result = false;
    CUTE_UNROLL
    for (int c = 0; c < Config::kColumnWarps; ++c) {
      result |= loop.shared.large_at[row_warp][c] == key;
    }
    return result;
  }

  // Raises references and weighs again, by all warps that share the rows; leaves the weights in
  // place of the scores.
  CUTE_DEVICE void raise(Scores& acc_s, int key) {
    static_assert(sizeof(Peak) * Config::kColumnWarps * Config::kWarpRows <= TileP::kBytes);
    Peak* const peaks = reinterpret_cast<Peak*>(p_tile) + lane / 4;  // (column warp, row)
    Tensor s = as_rows(acc_s);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Peak const mine = loop.softmax.peak(s, i, !loop.softmax.is_small(i));
      if (lane % 4 == 0) peaks[column_warp * Config::kWarpRows + i * 8] = mine;
    }
    sync_row_warps();  // all have written their peaks
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Peak all = peaks[i * 8];
      CUTE_UNROLL
      for (int c = 1; c < Config::kColumnWarps; ++c) {
        Peak const other = peaks[c * Config::kWarpRows + i * 8];
        all.is_too_large |= other.is_too_large;
        all.largest = fmaxf(all.largest, other.largest);
      }
      loop.softmax.raise_row(s, as_rows(loop.acc_o), all, i, loop.log2_scale);
    }
    loop.drop(s, key);
    sync_row_warps();  // the peaks are read by none any more
    publish(acc_s);
    sync_row_warps();  // P is there for all
  }

  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Arch::template async_copy_wait<0>();
    Arch::sync();  // K is there for all; what was in V's place, and P, are read by none
    loop.copy_v(key, 0);
    Scores acc_s;
    product_qk(acc_s);
    int const own_key = anew(key + column_warp * kSlice);
    loop.finish_scores(as_rows(acc_s), own_key, is_full);
    Scores acc_w = acc_s;
    Tensor w = as_rows(acc_w);  // (row, key)
    bool const ok = loop.softmax.weigh(w, loop.log2_scale);
    loop.drop(w, own_key);
    publish(acc_w);
    if (Arch::any(!ok) && lane == 0) loop.shared.large_at[row_warp][column_warp] = key;
    Arch::template async_copy_wait<0>();
    Arch::sync();  // P and V are there for all; K is read by none
    if (is_large(key)) raise(acc_s, own_key);
    loop.softmax.add();
    loop.copy_k(key + kN, 0);
    product_pv();
  }

  CUTE_DEVICE void run() {
    loop.copy_k(loop.range.begin, 0);
    if (lane == 0) loop.shared.large_at[row_warp][column_warp] = -1;
    Arch::template async_copy_wait<1>();
    Arch::sync();  // Q is there for all
    CUTE_UNROLL
    for (int k = 0; k < kStepsInRegisters; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) load_q(q_block, m, k, q_words[k * kRowBlocks + m]);
    }
    for (int key = loop.range.begin; key < loop.range.end; key += kN) {
      if (loop.is_full(key)) {
        step(key, true_type{});
      } else {
        step(key, false_type{});
      }
    }
  }
};

// Completes the sums of rows that several warps share: each has weighed its own keys, relative to
// the same reference. They pass through shared memory, (column warp, row), where K was: none reads
// it any more since the last tile's P was there.
template <class Config, class Arch, class Loop>
CUTE_DEVICE void merge_sums(Loop& loop) {
  static_assert(Config::kColumnWarps * Config::kBlockM * sizeof(float) <= Config::kBufferBytes);
  float* const sums = reinterpret_cast<float*>(&loop.shared);
  // One of the four threads of a warp that share a row.
  if (loop.column(0) == 0) {
    CUTE_UNROLL
    for (int i = 0; i < Loop::kRows; ++i) {
      sums[loop.column_warp() * Config::kBlockM + loop.row(i)] = loop.softmax.rows[i].sum;
    }
  }
  Arch::sync();  // all sums are there
  CUTE_UNROLL
  for (int i = 0; i < Loop::kRows; ++i) {
    float sum = sums[loop.row(i)];
    CUTE_UNROLL
    for (int c = 1; c < Config::kColumnWarps; ++c) sum += sums[c * Config::kBlockM + loop.row(i)];
    loop.softmax.rows[i].sum = sum;
  }
}

}  // namespace cutlass_attn::sm80
