// The loop over key tiles of the mma.sync forward kernel.
//
// A tile of keys goes through softmax, and then meets V, in slices of 16 keys: its weights are in
// registers for no longer than that. Two schedules, chosen by Config::kPipelined, beside the one of
// mainloop_split.hpp, where several warps share a row:
//
// pipelined  Q stays in registers, K and V have two buffers each. While a slice goes through
//            softmax, the tensor cores have the products around it to work on, in one straight
//            stretch of code:
//
//              tensor cores   P V(j-1)  Q K(j+1)      P V(j)  Q K(j+2)
//              the rest          weights(j)              weights(j+1)
//
// tiled      where Q has no room in registers: Q K of the whole tile first, so that Q is read from
//            shared memory once a tile; then weights(j+1) beside P V(j). One buffer each:
//
//              cp.async   V(n) ------+   K(n+1) ----------+
//              compute    Q K(n)     |   softmax, P V(n)  |   Q K(n+1) ...
//                      ^ K(n) landed   ^ V(n) landed
#pragma once

#include "core/dropout.hpp"
#include "core/mask.hpp"
#include "cute/fragment.hpp"
#include "cute/scheduler.hpp"
#include "cute/softmax.hpp"
#include "sm80/config.hpp"
#include "sm80/mainloop_split.hpp"
#include "sm80/tile_loader.hpp"

namespace cutlass_attn::sm80 {

template <class Config, class Score, class Arch>
struct MainloopForward {
  using Element = typename Config::Element;
  using Address = typename Arch::SmemAddress;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  using TiledMma = typename Config::template TiledMma<Arch>;
  static constexpr int kM = Config::kBlockM, kN = Config::kBlockN;
  static constexpr int kD = Config::kHeadDim, kDV = Config::kHeadDimV;
  static constexpr int kSlice = Config::kSlice, kSlices = Config::kSlices;
  static constexpr int kRowBlocks = Config::kWarpRows / 16;  // m16 blocks of a warp
  static constexpr int kRows = 2 * kRowBlocks;               // rows of a thread
  static constexpr int kGroups = Config::kKeyGroups;
  static constexpr int kStride = kGroups * kN;  // from a tile of a key group to its next

  using LoaderK = TileLoader<Arch, Element, kN, kD, Config::kGroupThreads>;
  using LoaderV = TileLoader<Arch, Element, kN, kDV, Config::kGroupThreads>;
  using Scores = decltype(partition_fragment_C(TiledMma{}, Shape<Int<kM>, Int<kSlice>>{}));
  using Output =
      decltype(partition_fragment_C(TiledMma{}, Shape<Int<kM>, Int<kDV / Config::kColumnWarps>>{}));
  // m16n8k16 operands of a warp: A of one m16 block, B of two n8 blocks.
  using Words = uint32_t[4];

  AttnParams const& p;
  typename Config::SharedStorage& shared;
  TileCoord const& tile;
  TileRange const& range;
  IntervalMask const& mask;
  Score const score;
  Dropout const dropout;
  float const log2_scale;
  int const group, group_thread;      // of the key group this thread belongs to
  int const first_key;                // of its first tile
  Address k_target;                   // where this thread copies to in K's buffer 0, for cp.async
  Address q_block, k_block, v_block;  // this lane's row of block (0, 0), for ldmatrix

  Output acc_o;  // (MMA, M, D)
  SoftmaxRows<Arch, kRows> softmax;
  Words p_words[kRowBlocks];  // P of a slice, as the A operand of P V
  Words q_words[Config::kPipelined ? kRowBlocks * (kD / 16) : 1];

  CUTE_DEVICE MainloopForward(AttnParams const& params, typename Config::SharedStorage& storage)
      : p(params),
        shared(storage),
        tile(shared.tile),
        range(shared.range),
        mask(shared.mask),
        score(params),
        dropout(params),
        log2_scale(score.log2_scale()),
        group(kGroups == 1 ? 0 : Arch::thread() / Config::kGroupThreads),
        group_thread(kGroups == 1 ? Arch::thread() : Arch::thread() % Config::kGroupThreads),
        first_key(range.begin + group * kN) {
    int const lane = group_thread % 32, warp = group_thread / 32;
    Address const q = Arch::smem_address(&shared) + Config::kQueriesAt;
    Address const k = Arch::smem_address(shared.group[group].k);
    Address const v = Arch::smem_address(shared.group[group].v);
    k_target = k + LoaderK::offset(group_thread);
    q_block = q + TileQ::offset(warp * 16 + lane % 16, lane / 16 * 8);
    k_block = k + TileK::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
    v_block = v + TileV::offset(lane % 16, lane / 16 * 8);
    clear(acc_o);
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) p_words[m][i] = 0;
    }
  }

  // Which rows this warp has, and which columns of those that Config::kColumnWarps share.
  CUTE_DEVICE int row_warp() const { return group_thread / 32 / Config::kColumnWarps; }
  CUTE_DEVICE int column_warp() const { return group_thread / 32 % Config::kColumnWarps; }

  // Row of the tile and column of the slice that element (i, j) of as_rows() is.
  CUTE_DEVICE int row(int i) const {
    return row_warp() * 16 + group_thread % 32 / 4 + i % 2 * 8 + i / 2 * (16 * Config::kWarps);
  }
  CUTE_DEVICE int column(int j) const { return group_thread % 4 * 2 + j % 2 + j / 2 * 8; }

  CUTE_DEVICE void sync() const {
    if constexpr (kGroups == 1) {
      Arch::sync();
    } else {
      Arch::sync(1 + group, Config::kGroupThreads);
    }
  }

  // Start copying the tile that begins at `key`, maybe beyond the last.
  CUTE_DEVICE void copy_k(int key, int stage) {
    LoaderK::load(k_target + stage * TileK::kBytes, shared.k, p.k.row_stride, key, p.seqlen_k,
                  p.head_dim, group_thread);
  }
  CUTE_DEVICE void copy_v(int key, int stage) {
    // V's buffers follow K's. Where rows are as long, so does this thread's place in them.
    Address target = k_target + Config::kStages * TileK::kBytes;
    if constexpr (kD != kDV) {
      target += LoaderV::offset(group_thread) - LoaderK::offset(group_thread);
    }
    LoaderV::load(target + stage * TileV::kBytes, shared.v, p.v.row_stride, key, p.seqlen_k,
                  p.head_dim_v, group_thread);
  }

  // acc += A B for one m16n8k16 block.
  template <class Acc>
  CUTE_DEVICE void multiply(Words const& a, uint32_t const* b, Acc&& acc) const {
    Tensor tA = make_tensor(reinterpret_cast<Element const*>(a), Shape<_8>{});
    Tensor tB = make_tensor(reinterpret_cast<Element const*>(b), Shape<_4>{});
    gemm(MMA_Atom<typename Arch::template Mma<Element>>{}, tA, tB, acc);
  }

  CUTE_DEVICE void load_q(int m, int k, Words& words) const {
    Arch::load_matrix(TileQ::block(q_block, m * Config::kWarps, k), words);
  }

  // S += Q K^T for the keys [16 n, 16 n + 16) of the K tile in buffer `stage`, columns [16 k, ...).
  template <class Q, class Acc>
  CUTE_DEVICE void multiply_qk(int stage, int n, int k, Q const& q, Acc&& acc) const {
    Words words;
    Arch::load_matrix(TileK::block(k_block + stage * TileK::kBytes, n, k), words);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) multiply(q[m], words + 2 * half, acc(_, m, half));
    }
  }

  // S of a slice with Q from registers.
  CUTE_DEVICE void product_qk(int stage, int slice, Scores& acc_s) const {
    clear(acc_s);
    CUTE_UNROLL
    for (int k = 0; k < kD / 16; ++k) multiply_qk(stage, slice, k, q_words + k * kRowBlocks, acc_s);
  }

  CUTE_DEVICE void load_v(int stage, int slice, int d, Words& words) const {
    Arch::load_matrix_trans(TileV::block(v_block + stage * TileV::kBytes, slice, d), words);
  }

  // O += P V for the slice whose weights p_words holds. `first` is its load_v(.., 0, ..), done
  // ahead.
  CUTE_DEVICE void product_pv(int stage, int slice, Words const& first) {
    CUTE_UNROLL
    for (int d = 0; d < kDV / 16; ++d) {
      Words words;
      if (d == 0) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) words[i] = first[i];
      } else {
        load_v(stage, slice, d, words);
      }
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        CUTE_UNROLL
        for (int m = 0; m < kRowBlocks; ++m) {
          multiply(p_words[m], words + 2 * half, acc_o(_, m, 2 * d + half));
        }
      }
    }
  }

  // Scores of the slice that begins at `key`: score functor and mask. `is_full`: no key is hidden.
  template <class S, class IsFull>
  CUTE_DEVICE void finish_scores(S&& s, int key, IsFull is_full) const {
    if constexpr (is_full && Score::kIsIdentity) return;
    // Keeps the compiler from holding the ends of every row's interval from slice to slice; it
    // spilled for them.
    asm volatile("" ::: "memory");
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int const q = tile.query(row(i)), head = tile.head(row(i));
      int const lo = is_full ? 0 : mask.lo(q) - key, hi = is_full ? 0 : mask.hi(q) - key;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(s); ++j) {
        int const n = column(j);
        float const x = score(s(i, j), tile.batch, head, q, key + n);
        s(i, j) = is_full || (n >= lo && n < hi) ? x : -kInf;
      }
    }
  }

  // Weights of a slice, rounded, in p_words.
  template <class W>
  CUTE_DEVICE void pack(W const& weights) {
    CUTE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        auto const pair = weights(_, m, i / 2);  // an m16n8 block: rows g and g + 8, two columns
        p_words[m][i] = Arch::template pack<Element>(pair(i % 2 * 2), pair(i % 2 * 2 + 1));
      }
    }
  }

  // Drops weights of a slice that begins at `key`, and scales the others up.
  template <class W>
  CUTE_DEVICE void drop(W&& w, int key) const {
    if constexpr (Score::kIsGeneral) {
      if (!dropout.is_active()) return;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        int const r = row(i);
        PhiloxWords const words =
            dropout.draw(tile.batch, tile.head(r), tile.query(r), key + column(0));
        CUTE_UNROLL
        for (int j = 0; j < size<1>(w); ++j) {
          // The slice is one half of the 32 keys of a draw, or a quarter. (An index that is no
          // constant would put the words into local memory.)
          uint32_t word = key % 32 < 16 ? words.word[j / 2] : words.word[2 + j / 2];
          if constexpr (kSlice == 8) {
            uint32_t const next = key % 32 < 16 ? words.word[1] : words.word[3];
            word = key % 16 < 8 ? word : next;
          }
          w(i, j) *= dropout.factor(word, j);
        }
      }
    }
  }

  // From the scores of a slice to its weights. What needs no weights, `meanwhile`, is done before
  // the warp agrees on whether a reference must be raised: it has no other way past that branch.
  template <class IsFull, class Meanwhile>
  CUTE_DEVICE void weigh(Scores& acc_s, int key, IsFull is_full, Meanwhile&& meanwhile) {
    Tensor s = as_rows(acc_s);  // (row, key)
    finish_scores(s, key, is_full);
    Scores acc_w;
    Tensor w = as_rows(acc_w);
    float sums[kRows];
    bool const ok = softmax.weigh(s, w, sums, log2_scale);
    drop(w, key);
    pack(acc_w);
    meanwhile();
    if (Arch::any(!ok)) {
      softmax.raise(s, w, as_rows(acc_o), sums, log2_scale);
      drop(w, key);
      pack(acc_w);
    }
    softmax.add(sums);
  }

  // --- pipelined -------------------------------------------------------------------------------

  // The i-th tile of this key group is in buffer i % 2. One step: weights of slice j beside P V of
  // the slice before and Q K of the one after.
  template <int j, class IsFull>
  CUTE_DEVICE void step(int key, int stage, int v_stage, Scores (&acc_s)[2], Words& v_first,
                        IsFull is_full) {
    product_pv(j == 0 ? v_stage : stage, (j + kSlices - 1) % kSlices, v_first);
    if constexpr (j + 1 == kSlices) {
      Arch::template async_copy_wait<1>();
      sync();  // the next K is there for all; this tile's K is read by none
      copy_k(key + 2 * kStride, stage);
      product_qk(stage ^ 1, 0, acc_s[0]);
    } else {
      product_qk(stage, j + 1, acc_s[(j + 1) % 2]);
    }
    weigh(acc_s[j % 2], key + j * kSlice, is_full, [&] {
      if constexpr (j == 0) {
        Arch::template async_copy_wait<1>();
        sync();  // this tile's V is there for all; the V before is read by none
        copy_v(key + kStride, stage ^ 1);
      }
      load_v(stage, j, 0, v_first);
    });
    if constexpr (j + 1 < kSlices) step<j + 1>(key, stage, v_stage, acc_s, v_first, is_full);
  }

  CUTE_DEVICE void run_pipelined() {
    copy_k(first_key, 0);
    copy_v(first_key, 0);
    copy_k(first_key + kStride, 1);
    Arch::template async_copy_wait<1>();
    sync();
    CUTE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) load_q(m, k, q_words[k * kRowBlocks + m]);
    }
    Scores acc_s[2];
    product_qk(0, 0, acc_s[0]);
    Words v_first = {0, 0, 0, 0};
    // Before the first slice there is no P V to do; it is done with weights of zero, on the V that
    // is there, so that all tiles run the same code.
    int stage = 0, v_stage = 0;
    for (int key = first_key; key < range.end; key += kStride) {
      if (range.is_full(key)) {
        step<0>(key, stage, v_stage, acc_s, v_first, true_type{});
      } else {
        step<0>(key, stage, v_stage, acc_s, v_first, false_type{});
      }
      v_stage = stage;
      stage ^= 1;
    }
    product_pv(v_stage, kSlices - 1, v_first);
  }

  // --- tiled -----------------------------------------------------------------------------------

  template <int j, class IsFull>
  CUTE_DEVICE void slice(Scores (&acc_s)[kSlices], int key, IsFull is_full) {
    weigh(acc_s[j], key + j * kSlice, is_full, [] {});
    Words v_first;
    load_v(0, j, 0, v_first);
    product_pv(0, j, v_first);
    if constexpr (j + 1 < kSlices) slice<j + 1>(acc_s, key, is_full);
  }

  template <class IsFull>
  CUTE_DEVICE void step(int key, IsFull is_full) {
    Arch::template async_copy_wait<0>();
    sync();  // K is there for all; the V before is read by none
    copy_v(key, 0);
    Scores acc_s[kSlices];
    CUTE_UNROLL
    for (int j = 0; j < kSlices; ++j) clear(acc_s[j]);
    CUTE_UNROLL
    for (int k = 0; k < kD / 16; ++k) {
      Words q[kRowBlocks];
      CUTE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) load_q(m, k, q[m]);
      CUTE_UNROLL
      for (int j = 0; j < kSlices; ++j) multiply_qk(0, j, k, q, acc_s[j]);
    }
    Arch::template async_copy_wait<0>();
    sync();  // V is there for all; K is read by none
    copy_k(key + kStride, 0);
    slice<0>(acc_s, key, is_full);
  }

  CUTE_DEVICE void run_tiled() {
    copy_k(first_key, 0);
    for (int key = first_key; key < range.end; key += kStride) {
      if (range.is_full(key)) {
        step(key, true_type{});
      } else {
        step(key, false_type{});
      }
    }
  }

  // Leaves the unnormalised O and the softmax state of this group's keys in acc_o and softmax.
  CUTE_DEVICE void run() {
    if (range.begin >= range.end) return;  // these queries see no key
    load_queries<Arch, TileQ, Element, kM, Config::kThreads>(
        p, tile, Arch::smem_address(&shared) + Config::kQueriesAt);
    if constexpr (kGroups > 1) {  // Q is loaded by all groups together
      Arch::template async_copy_wait<0>();
      Arch::sync();
    }
    if (first_key < range.end) {
      if constexpr (Config::kColumnWarps > 1) {
        SplitSchedule<Config, Score, Arch, MainloopForward>(*this).run();
      } else if constexpr (Config::kPipelined) {
        run_pipelined();
      } else {
        run_tiled();
      }
    }
    Arch::template async_copy_wait<0>();  // of tiles beyond the last
    softmax.complete();
  }
};

}  // namespace cutlass_attn::sm80
